"""Options of collectives with several workers."""

from __future__ import annotations

import pytest
from keras import ops

import keras_strategies as ks

TWO_BY_TWO = pytest.mark.parametrize(
    "cluster", ["two_by_two"], indirect=True, scope="session"
)


@TWO_BY_TWO
def test_options_of_calls_repeat_those_of_the_workers(cluster):
    def program(strategy):
        ones = strategy.experimental_distribute_values_from_function(
            lambda context: ops.ones((2,))
        )
        seconds = strategy.workers.group.timeout
        same = ks.CommunicationOptions(bytes_per_pack=8, timeout_seconds=seconds)
        other = ks.CommunicationOptions(timeout_seconds=seconds + 1)

        def fn(x, options):
            context = ks.get_replica_context()
            return context.all_reduce("sum", [x, x + 1.0], options)[1]

        found = strategy.run(fn, args=(ones, same))
        total = strategy.extended.reduce_to("mean", ones, ["cpu:0", "cpu:1"], same)
        messages = []
        for call in (
            lambda: strategy.extended.reduce_to("sum", ones, "cpu:0", other),
            lambda: ks.MultiWorkerMirroredStrategy(communication_options=other),
            lambda: ks.MultiWorkerMirroredStrategy(
                communication_options=ks.CommunicationOptions(implementation="NCCL"),
                devices=strategy.extended.worker_devices,
            ),
        ):
            try:
                call()
            except ValueError as error:
                messages.append(str(error))
        values = [*strategy.experimental_local_results(found), *total.values]
        return [ops.convert_to_numpy(value).tolist() for value in values], messages

    for values, messages in cluster(program):
        assert values == [[8, 8], [8, 8], [1, 1], [1, 1]]
        first, second, third = messages
        assert "timeout between the workers" in first
        assert "Pass it to the first strategy" in second
        assert "NCCL connects GPUs" in third
