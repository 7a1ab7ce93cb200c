"""A backbone that was made outside of the scope: workers train the chief's."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from harness.training import assert_workers, numbers
from keras import layers
from multi_worker.clusters import model_parallel, scope_of

BACKEND = keras.backend.backend()
X = np.random.default_rng(0).normal(size=(23, 6)).astype("float32")
Y = X[:, :1] * 2 - X[:, 1:2]
OPTIONS: dict[str, Any] = {"batch_size": 10, "verbose": 0}


def trained(strategy: Any, is_sharded: bool = False) -> Any:
    is_chief = strategy is None or strategy.workers.is_chief
    keras.utils.set_random_seed(3 if is_chief else 9)
    if is_sharded:
        strategy = model_parallel(strategy=strategy)
    backbone = keras.Sequential(
        [keras.Input((6,)), layers.Dense(8, "tanh"), layers.BatchNormalization()]
    )
    keras.utils.set_random_seed(4)
    with scope_of(strategy):
        model = keras.Sequential([keras.Input((6,)), backbone, layers.Dense(1)])
        model.compile("adam", "mse")
    history = model.fit(X, Y, shuffle=False, epochs=2, **OPTIONS)
    scores = model.evaluate(X, Y, **OPTIONS)
    return numbers(model, history, scores, model.predict(X, verbose=0))


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["two-False"])
@pytest.mark.parametrize("is_sharded", [False, *[True] * (BACKEND != "tensorflow")])
def test_workers_train_the_backbone_of_the_chief(cluster: Any, is_sharded) -> None:
    assert_workers(trained(None), cluster(trained, is_sharded))


def trained_adapter(strategy: Any, is_made_outside: bool) -> Any:
    """Adapters of a frozen layer, which are added outside of the scope."""
    is_alone = strategy is None
    keras.utils.set_random_seed(3)
    with scope_of(None if is_alone or is_made_outside else model_parallel()):
        hidden = layers.Dense(8, "tanh")
        hidden.build((None, 6))
    if is_made_outside:
        hidden.enable_lora(2)
    with scope_of(None if is_alone else model_parallel()):
        model = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(1)])
    if not is_made_outside:
        hidden.enable_lora(2)
    model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
    history = model.fit(X, Y, shuffle=False, epochs=2, **OPTIONS)
    if strategy is not None:
        values = [variable.value for variable in model.trainable_variables]
        parameters = [p for p in model.parameters() if p.requires_grad]
        assert {id(p) for p in parameters} == {id(value) for value in values}
        assert [type(value).__name__ for value in values[1:3]] == ["DTensor"] * 2
    return numbers(model, history)


@pytest.mark.skipif(BACKEND != "torch", reason="parameters are those of Torch")
@pytest.mark.parametrize("is_made_outside", [True, False])
def test_adapters_from_outside_are_in_shards(cluster: Any, is_made_outside) -> None:
    expected = trained_adapter(None, is_made_outside)
    assert_workers(expected, cluster(trained_adapter, is_made_outside))
