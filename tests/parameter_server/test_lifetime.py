"""A cluster without references to its strategy leaves nothing behind."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import keras
import numpy as np
import psutil
import pytest

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

END_SECONDS = 30.0


def train() -> weakref.ref[Any]:
    """A cell of a notebook, which makes a cluster, a model and trains it."""
    resolver = ks.cluster_resolver.LocalClusterResolver(workers=1, ps=1)
    strategy = ks.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((16, 4), "float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0)
    return weakref.ref(strategy)


def own_threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def main() -> None:
    """Prints what was there during training, and what is left of it."""
    before = own_threads()
    reference = train()
    during = len(psutil.Process().children(recursive=True))
    gc.collect()
    deadline = time.monotonic() + END_SECONDS
    while psutil.Process().children() and time.monotonic() < deadline:
        time.sleep(0.1)
    left = len(psutil.Process().children(recursive=True))
    threads = sorted(own_threads() - before)
    print(json.dumps([during, reference() is None, left, threads]))


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_nothing_is_left_of_a_cluster() -> None:
    process = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=240
    )
    assert process.returncode == 0, process.stderr
    during, is_collected, processes, threads = json.loads(process.stdout)
    # The guard, a worker and a parameter server.
    assert during >= 3
    assert (is_collected, processes, threads) == (True, 0, [])


if __name__ == "__main__":
    main()
