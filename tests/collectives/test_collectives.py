"""`CrossDeviceOps`, packs, and `reduce` and `gather` of a strategy."""

from __future__ import annotations

import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from keras_strategies.communication.packing import pack_indices

KINDS = {
    "one_device": ks.ReductionToOneDevice,
    "nccl": ks.NcclAllReduce,
    "hierarchical": ks.HierarchicalCopyAllReduce,
}


def per_replica(strategy, *values):
    pairs = zip(values, strategy.placement.replicas, strict=True)
    move = strategy.engine.to_device
    return ks.PerReplica(
        [move(np.asarray(v, "float32"), device) for v, device in pairs]
    )


def assert_equal(found, expected) -> None:
    np.testing.assert_allclose(ops.convert_to_numpy(found), expected)


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def cross_device_ops(request):
    return request.param()


@pytest.mark.parametrize(
    "op, expected", [("sum", 4.0), ("MEAN", 2.0), ("min", 1.0), ("Max", 3.0)]
)
def test_reduce(mirrored, cross_device_ops, op, expected) -> None:
    value = per_replica(mirrored, np.full((2, 3), 1.0), np.full((2, 3), 3.0))
    result = cross_device_ops.reduce(op, value, "cpu:1")
    assert_equal(result, np.full((2, 3), expected))


def test_reduce_to_several_devices_gives_each_a_copy(mirrored, cross_device_ops):
    value = per_replica(mirrored, [1.0, 2.0], [3.0, 4.0])
    result = cross_device_ops.reduce("sum", value, value)
    assert isinstance(result, ks.Mirrored)
    for component in result.values:
        assert_equal(component, [4.0, 6.0])


@pytest.mark.one_backend
@pytest.mark.parametrize("kind", [ks.NcclAllReduce(), ks.HierarchicalCopyAllReduce(7)])
def test_batch_reduce_gives_each_value_its_own(mirrored, kind) -> None:
    shapes = [(3,), (2, 2), (), (5, 1)]
    values = [
        per_replica(mirrored, np.full(s, i), np.full(s, 10.0 * i))
        for i, s in enumerate(shapes)
    ]
    results = kind.batch_reduce("sum", [(value, "cpu:0") for value in values])
    for i, (result, shape) in enumerate(zip(results, shapes, strict=True)):
        assert_equal(result, np.full(shape, 11.0 * i))


def test_packs() -> None:
    with pytest.raises(ValueError, match="num_packs=-1"):
        ks.NcclAllReduce(-1)
    assert pack_indices(["float32"] * 3, [4, 4, 4], 8) == [[0, 1], [2]]
    assert pack_indices(["float32", "int32", "int32"], [4, 4, 4], 99) == [[0], [1, 2]]


def test_broadcast(mirrored, cross_device_ops) -> None:
    result = cross_device_ops.broadcast(ops.ones((2,)), ["cpu:0", "cpu:1"])
    assert len(result.values) == 2


def test_shapes_that_differ_are_an_error(mirrored, cross_device_ops) -> None:
    value = per_replica(mirrored, [1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"\[\(1,\), \(2,\)\]"):
        cross_device_ops.reduce("sum", value, "cpu:0")


@pytest.mark.parametrize("destinations", [None, [], 5])
def test_destinations_that_are_none(mirrored, cross_device_ops, destinations) -> None:
    value = per_replica(mirrored, 1.0, 3.0)
    with pytest.raises(ValueError, match="destinations"):
        cross_device_ops.reduce("sum", value, destinations)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_strategy_reduces_by_its_cross_device_ops(kind) -> None:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=kind())
    value = per_replica(strategy, [1.0, 2.0], [3.0, 4.0])
    assert_equal(strategy.reduce("SUM", value), [4.0, 6.0])


def test_reduce_along_an_axis_has_the_true_denominator(mirrored) -> None:
    value = per_replica(mirrored, [1.0], [2.0, 2.0])
    assert float(mirrored.reduce("mean", value, axis=0)) == pytest.approx(5 / 3)
    assert float(mirrored.reduce("sum", value, axis=0)) == 5.0
    assert float(mirrored.reduce("max", value, axis=0)) == 2.0


@pytest.mark.parametrize(
    "values, match",
    [
        ((1.0, 2.0), "scalar"),
        ((np.ones((1, 2)), np.ones((1, 3))), r"\(1, 3\)"),
        ((np.ones((1,)), np.ones((1, 3))), "equal but for that axis"),
    ],
)
def test_gather_of_what_does_not_fit(mirrored, values, match) -> None:
    with pytest.raises(ValueError, match=match):
        mirrored.gather(per_replica(mirrored, *values), 0)
