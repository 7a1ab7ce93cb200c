"""Values with components, and structures of them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.runtime.row_splits import split_sizes
from keras_strategies.values import PerReplica, regroup

pytestmark = pytest.mark.one_backend


def test_structures_that_differ_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"lengths \[1, 2\]"):
        regroup([[1], [1, 2]])


def test_values_print_their_components_and_cannot_be_iterated_by_mistake() -> None:
    assert repr(ks.PerReplica([1, 2])) == "PerReplica:{\n  0: 1,\n  1: 2\n}"
    with pytest.raises(RuntimeError, match="experimental_local_results"):
        list(ks.PerReplica([1, 2]))
    with pytest.raises(ValueError, match="for each replica"):
        ks.PerReplica([])


@pytest.mark.parametrize(
    "rows, parts, sizes",
    [
        (8, 2, [4, 4]),
        (7, 2, [4, 3]),
        (1, 4, [1, 0, 0, 0]),
        (0, 3, [0, 0, 0]),
        (13, 5, [3, 3, 3, 2, 2]),
        (3, 1, [3]),
    ],
)
def test_rows_are_split_evenly_and_none_is_lost(rows, parts, sizes) -> None:
    assert split_sizes(rows, parts) == sizes
    assert sum(sizes) == rows


def test_enumerations_accept_names_in_any_case() -> None:
    assert ks.ReduceOp.parse("mean") is ks.ReduceOp.MEAN
    assert ks.ReduceOp.parse(ks.ReduceOp.SUM) is ks.ReduceOp.SUM
    with pytest.raises(ValueError, match=r"'median' is not a ReduceOp.*'SUM'"):
        ks.ReduceOp.parse("median")


def test_communication_options_are_validated_and_frozen() -> None:
    for name, value in (
        ("bytes_per_pack", -1),
        ("bytes_per_pack", 1.5),
        ("timeout_seconds", 0),
        ("implementation", "smoke"),
    ):
        with pytest.raises(ValueError, match=str(value)):
            ks.CommunicationOptions(**{name: value})
    options = ks.CommunicationOptions(timeout_seconds=3, implementation="ring")
    assert options.implementation is ks.CommunicationImplementation.RING
    with pytest.raises(AttributeError):
        options.timeout_seconds = 4


#: `map_structure` of the backend's own structures, and of Keras.
TREES: dict[str, Any] = {"keras": keras.tree.map_structure}
if keras.backend.backend() == "jax":
    import jax

    TREES["jax"] = jax.tree.map
elif keras.backend.backend() == "torch":
    from torch.utils import _pytree

    TREES["torch"] = _pytree.tree_map
else:
    import tensorflow as tf

    TREES["tensorflow"] = tf.nest.map_structure


@pytest.mark.parametrize("name", TREES)
def test_structures_of_frameworks_keep_a_value_as_a_leaf(mirrored, name) -> None:
    def by_replica() -> dict[str, Any]:
        number = ks.get_replica_context().replica_id_in_sync_group
        return {"loss": keras.ops.cast(number, "float32") + 1}

    result = mirrored.run(by_replica)
    reduced = TREES[name](lambda x: mirrored.reduce("SUM", x, axis=None), result)
    assert float(reduced["loss"]) == 3.0  # `tf.distribute`: 3.


NUMBERS = {
    "float": float,
    "int": int,
    "round": round,
    "index": lambda value: [1, 2][value],
    "sum": lambda value: value + 1,
    "difference": lambda value: 1 - value,
    "quotient": lambda value: value / 2,
    "less": lambda value: value < 3,
    "format": lambda value: f"{value:.3f}",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_values_of_replicas_are_no_numbers_and_say_what_to_do(name) -> None:
    value = PerReplica([np.float32(1), np.float32(2)])
    with pytest.raises(TypeError, match=r"Reduce it with `strategy\.reduce"):
        NUMBERS[name](value)
    assert f"{value}" == str(value)
