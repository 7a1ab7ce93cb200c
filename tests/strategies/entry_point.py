"""Script: trains a layer after the code in its first argument, which may set

- `s`, the strategy with the scope that the model is made in; and
- `data`, what `fit` gets instead of the rows of this worker.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

import keras
import numpy as np

X = np.arange(6, dtype="float32").reshape(3, 2)
Y = np.array([[1.0], [2.0], [4.0]], "float32")
# One step of SGD from zeros on all three rows.
EXPECTED = 0.1 * 2 / 3 * X.T @ Y


def processes_of(strategy: Any) -> list[int]:
    """Those of a cluster of parameter servers."""
    if getattr(strategy, "cluster", None) is None:
        return []
    tasks = strategy.cluster.scheduler
    return [state.pid for state in (*tasks.workers.values(), *tasks.servers.values())]


def main(code: str) -> None:
    assert "keras_strategies.keras_compat" not in sys.modules
    given: dict[str, Any] = {"X": X, "Y": Y}
    exec(code, given)
    s = given.get("s")
    with s.scope() if s is not None else contextlib.nullcontext():
        dense = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)
        model = keras.Sequential([dense])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    data = (
        {"x": given["data"]} if "data" in given else {"x": X, "y": Y, "batch_size": 3}
    )
    model.fit(**data, verbose=0)
    kernel = keras.ops.convert_to_numpy(dense.kernel)
    np.testing.assert_allclose(kernel, EXPECTED, rtol=1e-5)
    found: dict[str, Any] = {"kernel": repr(dense.kernel)}
    if s is not None:
        found["processes"] = processes_of(s)
        found["owns"] = s.owns(model) and s.created(dense.kernel)
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
