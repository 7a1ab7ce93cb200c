"""Scheduled functions and sharded variables are those of `tf.distribute`."""

from __future__ import annotations

import json

import keras
import pytest

import keras_strategies as ks
from parameter_server import clusters
from parameter_server.tf_distribute_cases import (
    CASES,
    CASES_OF_TENSORFLOW,
    DIFFERENT,
    RECORD,
    Side,
    outcome,
)

pytestmark = pytest.mark.multiprocess


def dataset(start: int, stop: int):
    if keras.backend.backend() != "tensorflow":
        return range(start, stop)
    import tensorflow as tf

    return tf.data.Dataset.range(start, stop)


@pytest.mark.one_backend
def test_outcomes_are_those_of_tf_distribute() -> None:
    partitioner = ks.experimental.partitioners.FixedShardsPartitioner(2)
    cases = dict(CASES)
    if keras.backend.backend() == "tensorflow":
        cases |= CASES_OF_TENSORFLOW
    recorded = json.loads(RECORD.read_text())
    with clusters.start(workers=2, ps=2, variable_partitioner=partitioner) as strategy:
        side = Side(
            strategy,
            ks.ClusterCoordinator(strategy),
            lambda fn: fn,
            keras.Variable,
            dataset,
            keras.ops.convert_to_numpy,
        )
        found = {name: outcome(run, side) for name, run in cases.items()}
    different = {name for name in cases if found[name] != recorded[name]}
    assert different == set(DIFFERENT) & set(cases), {
        name: (recorded[name], found[name]) for name in different
    }
