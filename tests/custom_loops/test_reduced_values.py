"""Values that are reduced, gathered or the same on all replicas, in eager code.

What `tf.distribute` of TensorFlow 2.21 gives stands beside each.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from harness.strategies import STRATEGIES

import keras_strategies as ks

pytestmark = pytest.mark.one_backend


def tensor(value: Any, dtype: str = "float32") -> Any:
    return keras.ops.convert_to_tensor(np.asarray(value, dtype))


def number(value: Any) -> float:
    return float(keras.ops.convert_to_numpy(value))


def by_replica(dtype: str = "float32") -> Any:
    return keras.ops.cast(ks.get_replica_context().replica_id_in_sync_group + 1, dtype)


def local(strategy: Any, value: Any) -> list[Any]:
    return [
        keras.ops.convert_to_numpy(part).tolist()
        for part in strategy.experimental_local_results(value)
    ]


# Means of integers.


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
@pytest.mark.parametrize("in_function", [False, True], ids=["eager", "function"])
def test_the_mean_of_integers_is_a_fraction(mirrored, dtype, in_function) -> None:
    def mean() -> Any:
        own = {"rows": tensor([100, 200], dtype) + by_replica(dtype)}
        own["loss"] = by_replica()
        return ks.get_replica_context().all_reduce("MEAN", own)

    call = ks.function(lambda: mirrored.run(mean)) if in_function else None
    found = call() if call else mirrored.run(mean)
    assert local(mirrored, found["rows"]) == [[101.5, 201.5]] * 2  # There: the same.
    assert local(mirrored, found["loss"]) == [1.5] * 2  # There: 1.5.
    [rows, _] = mirrored.experimental_local_results(found["rows"])
    assert keras.backend.standardize_dtype(rows.dtype) == "float32"


def test_the_mean_of_integers_in_packs(mirrored) -> None:
    def mean() -> Any:
        options = ks.CommunicationOptions(bytes_per_pack=4)
        own = [by_replica("int32"), by_replica("int32") * 2]
        return ks.get_replica_context().all_reduce("MEAN", own, options)

    found = mirrored.run(mean)
    assert [local(mirrored, part)[1] for part in found] == [
        1.5,
        3.0,
    ]  # There: the same.


# Sums of values that are the same on all replicas.


@pytest.mark.parametrize(
    "make",
    {
        "tensor": lambda strategy, v: tensor(2.0),
        "number": lambda strategy, v: 2.0,
        "array": lambda strategy, v: np.ones(2, "float32"),
        "variable": lambda strategy, v: v,
        "reduced": lambda strategy, v: strategy.reduce("SUM", strategy.run(by_replica)),
        "gathered": lambda strategy, v: strategy.gather(
            strategy.run(lambda: tensor([1.0])), axis=0
        ),
        "python result": lambda strategy, v: strategy.run(lambda: 5),
        "argument": lambda strategy, v: strategy.run(lambda x: x, (tensor(5.0),)),
        "mirrored": lambda strategy, v: ks.Mirrored([tensor(2.0)] * 2),
        "in a structure": lambda strategy, v: {"loss": tensor(2.0)},
    }.items(),
    ids=lambda item: item[0],
)
def test_the_sum_of_one_value_is_an_error(mirrored, make) -> None:
    with mirrored.scope():
        v = keras.Variable(2.0)
    value = make[1](mirrored, v)
    # There: ValueError, of variables AssertionError.
    with pytest.raises(ValueError, match=r"(?s)not a `PerReplica`.*multiple"):
        mirrored.reduce("SUM", value, axis=None)
    if not isinstance(value, dict):
        with pytest.raises(ValueError, match=r"`reduce_to` with SUM"):
            mirrored.extended.reduce_to("SUM", value, "cpu:0")
    mean = mirrored.reduce("MEAN", value, axis=None)  # There: the value.
    assert type(mean) is type(value)


def test_the_sum_of_one_value_in_a_function_and_in_a_merge_call(mirrored) -> None:
    with pytest.raises(ValueError, match="not a `PerReplica`"):  # There: ValueError.
        ks.function(lambda: mirrored.reduce("SUM", tensor(2.0), axis=None))()
    one = tensor(2.0)

    def merged() -> Any:
        context = ks.get_replica_context()
        return context.merge_call(lambda s, x: s.reduce("SUM", x, axis=None), (one,))

    with pytest.raises(ValueError, match="not a `PerReplica`"):  # There: ValueError.
        mirrored.run(merged)


def test_sums_of_what_each_replica_makes(mirrored) -> None:
    """Equal values are per replica where each replica makes its own."""
    with mirrored.scope():
        v = keras.Variable(2.0)
        seen = keras.Variable(
            3.0, synchronization="on_read", aggregation="sum", trainable=False
        )

    def reduced() -> Any:
        return ks.get_replica_context().all_reduce("SUM", tensor(1.0))

    for fn, total in (
        (lambda: tensor(2.0), 4.0),
        (lambda: v + 0.0, 4.0),
        (reduced, 4.0),
    ):
        assert number(mirrored.reduce("SUM", mirrored.run(fn))) == total  # There: 4.
        compiled = ks.function(lambda fn=fn: mirrored.reduce("SUM", mirrored.run(fn)))
        assert number(compiled()) == total  # There: 4.

    def see() -> None:
        seen.assign_add(1.0)

    mirrored.run(see)
    expected = number(seen)
    # There 8, of 4 on each replica; here the total of 3 is on the first.
    assert number(mirrored.reduce("SUM", seen)) == expected == 5.0
    # Along an axis too, a value counts once for each replica, also there.
    assert number(mirrored.reduce("SUM", tensor([1.0, 2.0]), axis=0)) == 6.0
    assert number(mirrored.reduce("MEAN", tensor([1.0, 2.0]), axis=0)) == 1.5


def test_one_replica_has_nothing_to_multiply() -> None:
    strategy = ks.OneDeviceStrategy("cpu:0")
    assert number(strategy.reduce("SUM", tensor(2.0), axis=None)) == 2.0  # There: 2.
    assert number(strategy.reduce("SUM", strategy.run(lambda: 2.0))) == 2.0  # There: 2.


# Reduced values beside variables.


@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "central"])
def test_reduced_values_are_used_with_variables(name) -> None:
    """There: the same numbers."""
    strategy = STRATEGIES[name].make()
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        v = keras.Variable(1.0)
        metric = keras.metrics.Mean()
        optimizer = keras.optimizers.SGD(0.5)
        model = keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, "linear", False, "ones")]
        )

    def reduced() -> Any:
        return strategy.reduce("SUM", strategy.run(lambda: tensor(2.0)), axis=None)

    def gathered() -> Any:
        return strategy.gather(strategy.run(lambda: tensor([[2.0]])), axis=0)

    two = 2.0 * count
    v.assign(reduced())
    v.assign_add(reduced())
    assert number(v) == 2 * two
    v.assign_sub(reduced())
    v.assign_add(keras.ops.sum(gathered()))
    assert number(v) == 2 * two
    last = strategy.experimental_local_results(strategy.run(lambda: tensor(2.0)))[-1]
    v.assign_add(last)
    assert number(v) == 2 * two + 2
    assert number(v + reduced()) == number(reduced() + v) == 3 * two + 2
    assert number(keras.ops.add(v.value, reduced())) == 3 * two + 2
    metric.update_state(reduced())
    metric.update_state(gathered(), sample_weight=gathered())
    mean = (two + count * 4) / (1 + count * 2)
    np.testing.assert_allclose(number(metric.result()), mean, 1e-6)
    optimizer.apply([reduced()], [v])
    assert number(v) == 2 * two + 2 - 0.5 * two
    found = keras.ops.convert_to_numpy(model(gathered()))
    assert found.tolist() == [[2.0]] * count
    compiled = ks.function(lambda: strategy.run(lambda: tensor(2.0)))
    v.assign_add(strategy.reduce("SUM", compiled(), axis=None))
    assert number(v) == 2 * two + 2 + 0.5 * two
    # As arguments and captured, too.
    total = reduced()
    found = strategy.run(lambda x: v * 0.0 + x + total, (total,))
    assert local(strategy, found) == [2 * two] * count
    onto = strategy.extended.reduce_to("SUM", strategy.run(lambda: tensor(2.0)), v)
    strategy.extended.update(v, lambda v, x: v.assign_add(x), (onto,))
    assert number(v) == 3 * two + 2 + 0.5 * two


# Structures of values.


def test_values_from_a_function_that_returns_a_structure(mirrored) -> None:
    def make(context: Any) -> Any:
        own = float(context.replica_id_in_sync_group)
        return {"a": tensor(own), "b": (tensor(own + 1), [tensor(own + 2)])}

    values = mirrored.experimental_distribute_values_from_function(make)
    assert type(values) is dict  # There: dict.
    assert isinstance(values["b"][1][0], ks.PerReplica)
    assert local(mirrored, values["a"]) == [0.0, 1.0]  # There: 0, 1.
    found = mirrored.run(lambda q: q["a"] + q["b"][1][0], (values,))
    assert local(mirrored, found) == [2.0, 4.0]  # There: 2, 4.
    pair = mirrored.experimental_distribute_values_from_function(
        lambda context: (tensor(1.0), tensor(2.0))
    )
    assert [local(mirrored, part) for part in pair] == [[1.0, 1.0], [2.0, 2.0]]
    alone = ks.OneDeviceStrategy("cpu:0")
    assert type(alone.experimental_distribute_values_from_function(make)) is dict
