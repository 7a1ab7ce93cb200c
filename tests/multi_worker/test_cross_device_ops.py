"""Options of collectives with several workers."""

from __future__ import annotations

import pytest
from keras import ops
from multi_worker.clusters import on_clusters

import keras_strategies as ks

TWO_BY_TWO = on_clusters("two_by_two")


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
