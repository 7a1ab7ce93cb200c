"""Options and contexts of input, without any data."""

from __future__ import annotations

import pytest

import keras_strategies as ks

pytestmark = pytest.mark.one_backend("jax")


def test_contexts() -> None:
    context = ks.InputContext(num_replicas_in_sync=6)
    assert (context.num_input_pipelines, context.input_pipeline_id) == (1, 0)
    assert context.get_per_replica_batch_size(12) == 2
    with pytest.raises(ValueError, match=r"13 rows.*evenly.*6 replicas"):
        context.get_per_replica_batch_size(13)
    for arguments in ((0,), (1, 1), (2, -1), (1, 0, 0)):
        with pytest.raises(ValueError, match="must be 1 or more"):
            ks.InputContext(*arguments)


def test_input_options() -> None:
    options = ks.InputOptions(experimental_fetch_to_device=None)
    assert options.experimental_fetch_to_device is True
    assert options.experimental_replication_mode is ks.InputReplicationMode.PER_WORKER
    assert not options.experimental_place_dataset_on_device
    assert options.experimental_per_replica_buffer_size == 1
    named = ks.InputOptions(experimental_replication_mode="per_replica")
    assert named.experimental_replication_mode is ks.InputReplicationMode.PER_REPLICA


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("per_replica_buffer_size", -1, "number of batches"),
        ("place_dataset_on_device", True, "datasets are on the host"),
        ("replication_mode", "per_planet", "InputReplicationMode"),
        ("fetch_to_device", "no", "experimental_fetch_to_device.*'no'"),
    ],
)
def test_input_options_that_cannot_be(name, value, text) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        ks.InputOptions(**{f"experimental_{name}": value})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((3,), r"dataset_fn.*Received: 3 of"),
        ((lambda context: [], 3), "input_options"),
        *(
            ((lambda context: [], ks.InputOptions(**given)), "`fit` prefetches batches")
            for given in (
                {"experimental_fetch_to_device": False},
                {"experimental_per_replica_buffer_size": 2},
            )
        ),
    ],
)
def test_creators_that_cannot_be(arguments, text) -> None:
    with pytest.raises((ValueError, TypeError), match=text):
        ks.DatasetCreator(*arguments)


def test_options_of_another_kind_are_refused(mirrored) -> None:
    with pytest.raises(ValueError, match=r"`options` must be a ks\.InputOptions"):
        ks.get_strategy().experimental_distribute_dataset([[1.0]], options=3)
    with pytest.raises(ValueError, match="`session` is for TensorFlow 1"):
        mirrored.make_experimental_numpy_dataset([1.0], session=3)
