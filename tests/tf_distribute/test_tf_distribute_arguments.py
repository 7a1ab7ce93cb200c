"""Arguments that scripts pass to `tf.distribute` have the same effect here."""

from __future__ import annotations

import types

import keras
import numpy as np
import pytest

import keras_strategies as ks

CLUSTER = {"worker": ["a:1", "b:2"]}


class OwnResolver(ks.cluster_resolver.ClusterResolver):
    """One that does not call `super().__init__`."""

    def __init__(self) -> None:
        pass

    def cluster_spec(self):
        return ks.cluster_resolver.ClusterSpec(CLUSTER)


def tensorflows(task_type: str = "worker", task_id: int = 1):
    """What TensorFlow's resolvers and specifications have, without TensorFlow."""
    spec = types.SimpleNamespace(as_dict=lambda: dict(CLUSTER))
    return types.SimpleNamespace(
        cluster_spec=lambda: spec, task_type=task_type, task_id=task_id, rpc_layer=None
    )


def test_resolver_without_super_init_has_no_task() -> None:
    resolver = OwnResolver()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None,) * 3
    assert resolver.master() == ""
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master() == "b:2"
    assert resolver.num_accelerators(config_proto=None) == {}


def test_cluster_spec_of_tensorflow_is_taken() -> None:
    resolver = ks.cluster_resolver.SimpleClusterResolver(tensorflows().cluster_spec())
    assert resolver.cluster_spec() == CLUSTER


def test_resolver_of_tensorflow_is_taken(monkeypatch) -> None:
    union = ks.cluster_resolver.UnionResolver(tensorflows())
    assert union.cluster_spec() == CLUSTER
    assert (union.task_type, union.task_id) == ("worker", 1)
    monkeypatch.setenv("KS_CLUSTER_SECRET", "a secret of many characters")
    for make in (ks.Server, ks.ParameterServerStrategy):
        with pytest.raises(ValueError, match="has no 'ps'"):
            make(tensorflows())
    # The cluster is looked at: the task is not one of it.
    for make in (ks.MultiWorkerMirroredStrategy, ks.TPUStrategy):
        with pytest.raises(ValueError, match="has 2 of them"):
            make(tensorflows(task_id=5))


@pytest.mark.parametrize(
    "make",
    [ks.MultiWorkerMirroredStrategy, ks.TPUStrategy, ks.ParameterServerStrategy],
)
def test_something_else_than_a_resolver_is_refused(make) -> None:
    with pytest.raises(ValueError, match="Received: 'tpu' of type str"):
        make("tpu")


def test_multi_worker_without_a_cluster_has_an_empty_resolver() -> None:
    strategy = ks.MultiWorkerMirroredStrategy(devices=["cpu:0"])
    assert not strategy.cluster_resolver.cluster_spec()
    assert strategy.cluster_resolver.task_type is None
    assert strategy.cluster_resolver.is_chief


def test_experimental_strategies_have_the_older_signatures() -> None:
    ring = ks.experimental.CollectiveCommunication.RING
    strategy = ks.experimental.MultiWorkerMirroredStrategy(ring, devices=["cpu:0"])
    assert isinstance(strategy, ks.MultiWorkerMirroredStrategy)
    with pytest.raises(ValueError, match="Both `communication` and"):
        ks.experimental.MultiWorkerMirroredStrategy(
            "ring", communication_options=ks.CommunicationOptions(), devices=["cpu:0"]
        )
    with pytest.raises(ValueError, match="CommunicationImplementation"):
        ks.experimental.MultiWorkerMirroredStrategy("telegraph")
    cores = ks.DeviceAssignment([["cpu:0"], ["cpu:1"]])
    strategy = ks.experimental.TPUStrategy(device_assignment=cores)
    assert strategy.num_replicas_in_sync == 2


def test_variables_take_the_enumerations(mirrored) -> None:
    with mirrored.scope():
        summed = keras.Variable(10.0, aggregation=ks.VariableAggregation.SUM)
        local = keras.Variable(
            0.0,
            synchronization=ks.VariableSynchronization.ON_READ,
            aggregation=ks.VariableAggregation.MEAN,
        )

    def fn() -> None:
        replica = ks.get_replica_context().replica_id_in_sync_group
        value = keras.ops.cast(replica + 1, "float32")
        summed.assign(value)
        local.assign(value)

    mirrored.run(fn)
    assert float(keras.ops.convert_to_numpy(summed.value)) == 3.0
    assert float(keras.ops.convert_to_numpy(local.value)) == 1.5


def test_dataset_is_reduced(mirrored) -> None:
    rows = np.arange(10, dtype="float32")
    dataset = mirrored.experimental_distribute_dataset(rows, batch_size=4)

    def add(total, batch):
        parts = map(keras.ops.convert_to_numpy, batch.values)
        return total + sum(float(part.sum()) for part in parts)

    assert dataset.reduce(1.0, add) == 46.0


def test_loop_saves_without_run(tmp_path) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    stopped = []
    handler = ks.PreemptionCheckpointHandler(
        None,
        checkpoint_or_checkpoint_manager=model,
        checkpoint_dir=tmp_path,
        termination_config=ks.TerminationConfig(exit_fn=lambda: stopped.append(1)),
    )
    with handler.watch_preemption_scope():
        for _ in range(3):
            handler.save_checkpoint_if_preempted()
        assert handler.total_run_calls == 3 and not stopped
        handler._requests.steps.request_stop()
        handler.save_checkpoint_if_preempted()
    assert stopped
    again = ks.PreemptionCheckpointHandler(None, model, tmp_path)
    assert again.total_run_calls == 3
    again.close()
