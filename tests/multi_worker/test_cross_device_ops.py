"""`CrossDeviceOps` and options of collectives with several workers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import ops
from multi_worker.clusters import on_clusters

import keras_strategies as ks

TWO_BY_TWO = on_clusters("two_by_two")
X = np.random.default_rng(3).normal(size=(14, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def fitted(strategy, learning_rate):
    """Weights after a batch of 8 rows and one of 6."""
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(learning_rate), "mse")
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return [ops.convert_to_numpy(variable) for variable in model.trainable_variables]


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.skipif(
    keras.backend.backend() == "jax", reason="JAX takes the classes of this package"
)
@TWO_BY_TWO
def test_replicas_of_a_worker_are_combined_by_it(cluster):
    def program(strategy):
        class Doubling(ks.CrossDeviceOps):
            def broadcast_implementation(self, tensor, destinations):
                return super().broadcast_implementation(tensor * 2.0, destinations)

        own = ks.MultiWorkerMirroredStrategy(
            devices=strategy.extended.worker_devices, cross_device_ops=Doubling()
        )
        ones = own.experimental_distribute_values_from_function(
            lambda context: ops.ones(())
        )
        reduced = own.run(
            lambda x: ks.get_replica_context().all_reduce("sum", x), (ones,)
        )
        sums = [
            *own.experimental_local_results(reduced),
            own.reduce("sum", ones),
            own.extended.reduce_to("sum", ones, "cpu:0") / 2.0,
        ]
        weights = fitted(own, 0.1)
        return [float(ops.convert_to_numpy(value)) for value in sums], weights

    expected = fitted(ks.OneDeviceStrategy("cpu:0"), 0.2)
    for sums, weights in cluster(program):
        assert sums == [8.0] * 4
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@TWO_BY_TWO
def test_options_of_calls_repeat_those_of_the_workers(cluster):
    def program(strategy):
        ones = strategy.experimental_distribute_values_from_function(
            lambda context: ops.ones((2,))
        )
        seconds, devices = strategy.workers.group.timeout, ["cpu:0", "cpu:1"]
        same = ks.CommunicationOptions(bytes_per_pack=8, timeout_seconds=seconds)
        other = ks.CommunicationOptions(timeout_seconds=seconds + 1)
        nccl = ks.CommunicationOptions(implementation="NCCL")

        def fn(x, options):
            context = ks.get_replica_context()
            return context.all_reduce("sum", [x, x + 1.0], options)[1]

        found = strategy.run(fn, args=(ones, same))
        total = strategy.extended.reduce_to("mean", ones, devices, same)
        make = ks.MultiWorkerMirroredStrategy
        with pytest.raises(ValueError, match="timeout between the workers"):
            strategy.extended.reduce_to("sum", ones, "cpu:0", other)
        with pytest.raises(ValueError, match="Pass it to the first strategy"):
            make(communication_options=other)
        with pytest.raises(ValueError, match="NCCL connects GPUs"):
            make(communication_options=nccl, devices=strategy.extended.worker_devices)
        values = [*strategy.experimental_local_results(found), *total.values]
        return [ops.convert_to_numpy(value).tolist() for value in values]

    assert cluster(program) == [[[8, 8], [8, 8], [1, 1], [1, 1]]] * 2
