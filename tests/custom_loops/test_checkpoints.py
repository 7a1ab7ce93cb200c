"""Variables of which each replica has its own value: what a file holds of them."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend


class Counting(keras.Layer):
    """Holds a value of each replica's own."""

    def __init__(self, aggregation: str):
        super().__init__()
        options = {"synchronization": "on_read", "aggregation": aggregation}
        self.seen = keras.Variable(0.0, trainable=False, name="seen", **options)
        self.built = True

    def call(self, x: Any) -> Any:
        return x


def model_of(aggregation: str) -> keras.Model:
    inputs = keras.Input((1,))
    return keras.Model(inputs, Counting(aggregation)(inputs))


def count(strategy: Any, model: keras.Model) -> None:
    """Replica r adds r + 1."""
    seen = model.layers[-1].seen

    def add() -> None:
        replica = ks.get_replica_context().replica_id_in_sync_group
        seen.assign_add(ops.cast(replica, "float32") + 1.0)

    strategy.run(add)


def total(model: keras.Model) -> float:
    return float(ops.convert_to_numpy(model.layers[-1].seen))


@pytest.mark.parametrize("form", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize(
    "aggregation, once, twice",
    [("sum", 3, 6), ("mean", 1.5, 3), ("only_first_replica", 1, 2)],
)
def test_the_value_of_all_replicas_is_saved_and_goes_on(
    mirrored, tmp_path, form, aggregation, once, twice
):
    """A sum is split between the replicas when it is restored."""
    with mirrored.scope():
        model, restored = model_of(aggregation), model_of(aggregation)
    count(mirrored, model)
    path = tmp_path / form
    (model.save if form == "model.keras" else model.save_weights)(path)
    restored.load_weights(path)
    assert total(model) == total(restored) == once
    count(mirrored, restored)
    assert total(restored) == twice


def test_a_plain_variable_is_restored_from_it_and_the_other_way_round(
    mirrored, tmp_path
):
    with mirrored.scope():
        model = model_of("sum")
    plain = model_of("sum")
    count(mirrored, model)
    model.save_weights(tmp_path / "there.weights.h5")
    plain.load_weights(tmp_path / "there.weights.h5")
    assert total(plain) == 3
    plain.layers[-1].seen.assign(5.0)
    plain.save_weights(tmp_path / "back.weights.h5")
    model.load_weights(tmp_path / "back.weights.h5")
    assert total(model) == 5
    count(mirrored, model)
    assert total(model) == 8
