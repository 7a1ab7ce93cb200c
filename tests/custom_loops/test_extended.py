"""`strategy.extended`: the view that scripts for `tf.distribute` use."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks


def test_update_is_refused_on_a_replica(mirrored):
    with mirrored.scope():
        variable = keras.Variable(1.0)

    def fn():
        mirrored.extended.update(variable, lambda v: v.assign(2.0))

    with pytest.raises(RuntimeError, match=r"extended\.update.*replica context"):
        mirrored.run(fn)


def test_local_results_of_variables_and_structures(mirrored):
    with mirrored.scope():
        weight = keras.Variable([1.0, 2.0])
        count = keras.Variable(
            0.0, synchronization="on_read", aggregation="sum", trainable=False
        )

    def fn():
        replica = ks.get_replica_context().replica_id_in_sync_group
        count.assign_add(ops.cast(replica, "float32") + 1.0)

    mirrored.run(fn)
    local = mirrored.experimental_local_results
    assert [float(value) for value in local(count)] == [1, 2]
    assert [ops.convert_to_numpy(v).tolist() for v in local(weight)] == [[1, 2]] * 2
    first, second = local({"a": (count, 3), "b": ks.PerReplica([5, 6])})
    assert (float(first["a"][0]), first["a"][1], first["b"]) == (1, 3, 5)
    assert (float(second["a"][0]), second["a"][1], second["b"]) == (2, 3, 6)
    assert local(4) == (4,)
    alone = ks.OneDeviceStrategy("cpu:0")
    assert alone.experimental_local_results(weight) == (weight,)
    assert alone.experimental_local_results([1, 2]) == ([1, 2],)


def test_a_variable_is_a_destination(mirrored):
    with mirrored.scope():
        variable = keras.Variable(1.0)
    value = ks.PerReplica([ops.ones(()), ops.ones(())])
    total = mirrored.extended.reduce_to("sum", value, variable)
    assert [float(own) for own in total.values] == [2, 2]
    results = mirrored.extended.update(
        variable, lambda v, d: [v.assign(v + d), 7], args=(total,), group=False
    )
    assert float(ops.convert_to_numpy(variable)) == 3
    assert results[1] == [7, 7]
    with pytest.raises(TypeError, match="`group` must be True or False"):
        mirrored.extended.update(variable, lambda v: v, group="yes")
    with pytest.raises(TypeError, match=r"`fn` of `extended\.update`"):
        mirrored.extended.update(variable, 3)


def test_reduction_over_several_axes(mirrored):
    value = ks.PerReplica([ops.ones((2, 3)), ops.ones((1, 3)) * 4])
    assert float(mirrored.reduce("mean", value, axis=(0, 1))) == 2
    assert float(mirrored.reduce("sum", value, axis=[0, -1])) == 18
    assert float(mirrored.reduce("max", value, axis=(0, 1))) == 4
    with pytest.raises(ValueError, match=r"axis \(0, 2\).*\(2, 3\)"):
        mirrored.reduce("sum", value, axis=(0, 2))
    with pytest.raises(ValueError, match="sequence of ints"):
        mirrored.reduce("sum", value, axis="0")


def test_placement_with_another_variable(mirrored):
    with mirrored.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([weight])
    for other in (weight, optimizer.variables[-1]):
        with mirrored.extended.colocate_vars_with(other):
            made = keras.Variable([3.0, 4.0])
        assert mirrored.extended.variable_created_in_scope(made)
        places = [
            [copy.device for copy in mirrored.drivers.fit.copies(variable)]
            for variable in (made, other)
        ]
        assert places[0] == places[1]
    for given, error, match in (
        ("weight", TypeError, "Received: 'weight' of type str"),
        (keras.Variable(1.0), RuntimeError, "was not created in the scope"),
    ):
        with (
            pytest.raises(error, match=match),
            mirrored.extended.colocate_vars_with(given),
        ):
            pass
    assert not mirrored.extended.variable_created_in_scope("weight")


@pytest.mark.skipif(keras.backend.backend() != "jax", reason="shards are JAX's")
def test_placement_with_a_sharded_variable():
    strategy = ks.ModelParallelStrategy(
        {"kernel": (None, "model")}, ["cpu:0", "cpu:1"], 2
    )
    with strategy.scope():
        kernel = keras.Variable(np.ones((4, 2), "float32"), name="kernel")
    with strategy.extended.colocate_vars_with(kernel):
        alike = keras.Variable(np.ones((4, 2), "float32"), name="other")
        vector = keras.Variable(np.ones((2,), "float32"), name="vector")
    shapes = [[c.value.shape for c in strategy.drivers.fit.copies(v)] for v in (alike,)]
    assert shapes == [[(4, 1), (4, 1)]]
    assert [c.value.shape for c in strategy.drivers.fit.copies(vector)] == [(2,), (2,)]


def test_options_of_run(mirrored):
    value = ks.PerReplica([ops.ones((2,)), ops.ones((1,))])
    static = ks.RunOptions(experimental_enable_dynamic_batch_size=False)
    rows = mirrored.run(lambda x: ops.shape(x)[0], args=(value,))
    assert rows.values == (2, 1)
    with pytest.raises(ValueError, match=r"same shapes.*\[\[\[2\]\], \[\[1\]\]\]"):
        mirrored.run(lambda x: x, args=(value,), options=static)
    even = ks.PerReplica([ops.ones((2,)), ops.zeros((2,))])
    assert len(mirrored.run(lambda x: x, args=(even,), options=static).values) == 2
    for strategy in (mirrored, ks.get_strategy()):
        with pytest.raises(TypeError, match=r"`options` must be a ks\.RunOptions"):
            strategy.run(lambda: 1, options="fast")
