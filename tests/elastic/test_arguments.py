"""Errors of elastic strategies, before workers connect or train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.training.model_input import model_arguments

ELASTIC = ks.Elastic()
BACKEND = keras.backend.backend()


def test_other_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be a ks\.Elastic or None"):
        ks.MultiWorkerMirroredStrategy(elastic=3)  # type: ignore[arg-type]


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "given, message",
    [
        ({"min_workers": 0}, "`min_workers` must be a number of workers, 1 or more"),
        ({"min_workers": True}, "min_workers=True"),
        ({"min_workers": 3, "max_workers": 2}, "3 or more. Received: max_workers=2"),
        ({"rejoin": "yes"}, "`rejoin` must be True or False"),
        ({"timeout_seconds": 0}, "timeout_seconds=0"),
    ],
)
def test_options_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        ks.Elastic(**given)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="it has no sharded variables")
def test_sharded_variables_are_refused() -> None:
    text = r"shards of the variables|Keras"
    with pytest.raises((ValueError, RuntimeError), match=text):
        ks.ModelParallelStrategy(elastic=ELASTIC)


def test_a_minimum_above_the_cluster_is_an_error(monkeypatch) -> None:
    cluster = '{"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": %s}'
    monkeypatch.setenv("TF_CONFIG", cluster % '{"type": "worker", "index": 0}')
    with pytest.raises(ValueError, match="more workers than the cluster describes: 2"):
        ks.MultiWorkerMirroredStrategy(elastic=ks.Elastic(min_workers=3))


def test_workers_without_addresses_are_an_error(monkeypatch) -> None:
    monkeypatch.setenv("KERAS_DISTRIBUTION_JOB_ADDRESSES", "127.0.0.1:1")
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "2")
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "1")
    with pytest.raises(ValueError, match="has the address of the first worker only"):
        ks.MultiWorkerMirroredStrategy(elastic=ELASTIC)


def elastic_strategy() -> Any:
    workers = SimpleNamespace(actions=SimpleNamespace(is_fixed=False), group=None)
    return SimpleNamespace(workers=workers, drivers=SimpleNamespace(servers=None))


def test_data_of_each_worker_is_refused() -> None:
    data = ks.DatasetCreator(lambda context: np.zeros((4, 1)))
    with pytest.raises(ValueError, match="each worker reads different rows"):
        model_arguments(elastic_strategy(), "fit", {"x": data})


def test_divided_files_are_refused() -> None:
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.range(4).batch(2)
    options = tf.data.Options()
    policies = tf.data.experimental.AutoShardPolicy
    options.experimental_distribute.auto_shard_policy = policies.FILE
    with pytest.raises(ValueError, match="auto_shard_policy is FILE"):
        model_arguments(elastic_strategy(), "fit", {"x": data.with_options(options)})
    found = model_arguments(elastic_strategy(), "fit", {"x": data})
    assert found["x"] is data
