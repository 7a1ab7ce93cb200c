"""Models of keras_rs under synchronous strategies: tables, losses and metrics."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks

pytest.importorskip("keras_rs", reason="keras_rs is not installed")

import keras_rs
from harness.keras_rs_models import BATCH, ranking_data, ranking_model
from harness.strategies import STRATEGIES

LOSSES = (
    *("PairwiseHingeLoss", "ListMLELoss", "PairwiseLogisticLoss"),
    *("PairwiseMeanSquaredError", "PairwiseSoftZeroOneLoss"),
)


def trained(loss: str) -> tuple[Any, dict[str, list[float]], np.ndarray]:
    """A model after two epochs, its history and its predictions."""
    x, y = ranking_data()
    if loss == "ListMLELoss":
        # It takes the logarithm of scores that are masked.
        y = np.abs(y)
    optimizer = keras.optimizers.Adagrad(0.1)
    model = ranking_model(optimizer, getattr(keras_rs.losses, loss)())
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return model, history.history, model.predict(x, batch_size=BATCH, verbose=0)


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["mirrored_2-PairwiseHingeLoss"])
@pytest.mark.parametrize(
    ("strategy", "loss"),
    [*(("mirrored_2", loss) for loss in LOSSES), ("central", LOSSES[0])],
)
def test_it_trains_as_on_one_device(strategy: str, loss: str) -> None:
    _, expected, predicted = trained(loss)
    with STRATEGIES[strategy].make().scope():
        model, found, ours = trained(loss)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(ours, predicted, rtol=1e-4, atol=1e-5)
    assert model.count_params() == 40 * 4 + 60 * 6 + 14 * 14 + 14 + 14 * 4 + 4


@pytest.mark.one_backend("torch")
def test_tables_may_have_an_optimizer_of_their_own() -> None:
    x, y = ranking_data(BATCH)
    found = []
    for rate in (0.0, 0.5):
        with ks.OneDeviceStrategy("cpu:0").scope():
            chosen = {".*/movies/.*": keras.optimizers.SGD(rate)}
            default = keras.optimizers.SGD(0.1)
            optimizers = keras.optimizers.OptimizerMap(default, chosen)
            model = ranking_model(keras.optimizers.MultiOptimizer(optimizers))
            model.embeddings.build({name: value.shape for name, value in x.items()})
            before = _tables(model)
            model.train_on_batch(x, y)
            after = _tables(model)
        found.append({name for name in before if np.any(before[name] != after[name])})
    assert found == [{"users"}, {"users", "movies"}]


def _tables(model: Any) -> dict[str, np.ndarray]:
    tables = model.embeddings.get_embedding_tables()
    return {name: keras.ops.convert_to_numpy(t).copy() for name, t in tables.items()}
