"""Options and contexts of input, without any data."""

from __future__ import annotations

import pytest

import keras_strategies as ks

pytestmark = pytest.mark.one_backend("jax")


def test_per_replica_batch_size() -> None:
    context = ks.InputContext(num_replicas_in_sync=6)
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match=r"13 rows.*evenly.*6 replicas"):
        context.get_per_replica_batch_size(13)


def test_context_defaults_are_one_worker() -> None:
    context = ks.InputContext()
    assert context.num_input_pipelines == 1
    assert context.input_pipeline_id == 0
    assert context.num_replicas_in_sync == 1


@pytest.mark.parametrize("arguments", [(0,), (1, 1), (2, -1), (1, 0, 0)])
def test_a_context_that_cannot_be(arguments) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        ks.InputContext(*arguments)


def test_input_options() -> None:
    options = ks.InputOptions()
    assert options.experimental_fetch_to_device
    assert options.experimental_replication_mode is ks.InputReplicationMode.PER_WORKER
    assert not options.experimental_place_dataset_on_device
    assert options.experimental_per_replica_buffer_size == 1
    named = ks.InputOptions(experimental_replication_mode="per_replica")
    assert named.experimental_replication_mode is ks.InputReplicationMode.PER_REPLICA


def test_input_options_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="number of batches"):
        ks.InputOptions(experimental_per_replica_buffer_size=-1)
    with pytest.raises(ValueError, match="dataset for each replica"):
        ks.InputOptions(experimental_place_dataset_on_device=True)
    with pytest.raises(ValueError, match="InputReplicationMode"):
        ks.InputOptions(experimental_replication_mode="per_planet")


def test_the_dataset_function_of_a_creator_is_callable() -> None:
    with pytest.raises(ks.errors.InvalidTypeError, match=r"dataset_fn.*Received: 3 of"):
        ks.DatasetCreator(3)
    with pytest.raises(TypeError, match="input_options"):
        ks.DatasetCreator(lambda context: [], input_options=3)


def test_none_moves_batches_to_the_devices() -> None:
    options = ks.InputOptions(experimental_fetch_to_device=None)
    assert options.experimental_fetch_to_device is True
    with pytest.raises(TypeError, match=r"experimental_fetch_to_device.*'no'"):
        ks.InputOptions(experimental_fetch_to_device="no")


@pytest.mark.parametrize(
    "given",
    [
        {"experimental_fetch_to_device": False},
        {"experimental_per_replica_buffer_size": 2},
    ],
)
def test_a_creator_refuses_options_that_fit_has_no_use_for(given) -> None:
    with pytest.raises(ValueError, match="`fit` prefetches batches"):
        ks.DatasetCreator(lambda context: [], ks.InputOptions(**given))


def test_options_of_another_kind_are_refused(mirrored) -> None:
    with pytest.raises(ValueError, match=r"`options` must be a ks\.InputOptions"):
        mirrored.experimental_distribute_dataset([1.0], options=3)
    with pytest.raises(ValueError, match=r"`options` must be a ks\.InputOptions"):
        ks.get_strategy().experimental_distribute_dataset([[1.0]], options=3)
    with pytest.raises(ValueError, match="`session` is for TensorFlow 1"):
        mirrored.make_experimental_numpy_dataset([1.0], session=3)
