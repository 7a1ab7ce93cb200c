"""Values that are reduced, gathered or the same on all replicas, in eager code."""

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


def local(strategy: Any, value: Any) -> list[Any]:
    return [
        keras.ops.convert_to_numpy(part).tolist()
        for part in strategy.experimental_local_results(value)
    ]


@pytest.mark.parametrize(
    "make",
    {
        "tensor": lambda strategy, v: tensor(2.0),
        "variable": lambda strategy, v: v,
        "python result": lambda strategy, v: strategy.run(lambda: 5),
        "mirrored": lambda strategy, v: ks.Mirrored([tensor(2.0)] * 2),
    }.items(),
    ids=lambda item: item[0],
)
def test_the_sum_of_one_value_is_an_error(mirrored, make) -> None:
    with mirrored.scope():
        v = keras.Variable(2.0)
    value = make[1](mirrored, v)
    with pytest.raises(ValueError, match=r"(?s)not a `PerReplica`.*multiple"):
        mirrored.reduce("SUM", value, axis=None)
    with pytest.raises(ValueError, match="not a `PerReplica`"):
        ks.function(lambda: mirrored.reduce("SUM", value, axis=None))()
    with pytest.raises(ValueError, match=r"`reduce_to` with SUM"):
        mirrored.extended.reduce_to("SUM", value, "cpu:0")
    assert type(mirrored.reduce("MEAN", value, axis=None)) is type(value)


@pytest.mark.parametrize("name", ["one_device", "mirrored_2", "central"])
def test_reduced_values_are_used_with_variables(name) -> None:
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
    last = strategy.experimental_local_results(strategy.run(lambda: tensor(2.0)))[-1]
    v.assign_add(last)
    assert number(v) == 2 * two + 2
    assert number(v + reduced()) == number(reduced() + v) == 3 * two + 2
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
