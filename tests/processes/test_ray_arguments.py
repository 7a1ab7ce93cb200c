"""Errors for arguments before Ray is needed."""

from __future__ import annotations

import pytest

import keras_strategies as ks

pytestmark = pytest.mark.one_backend("jax")

Resolver = ks.cluster_resolver.RayClusterResolver


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"workers": 0}, "`workers` must be an int of 1 or more"),
        ({"workers": 2, "min_workers": 3}, "`min_workers` must be `workers` or fewer"),
        ({"placement": "NEAR"}, "`placement` must be one of 'SPREAD', 'PACK'"),
        ({"start_seconds": 0}, "`start_seconds` must be a number of seconds above 0"),
        ({"resources_per_worker": {"CPU": 0}}, "`resources_per_worker` must be a dict"),
    ],
)
def test_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        Resolver(**arguments)


def test_strategies():
    with pytest.raises(ValueError, match="needs `snapshot_folder` on Ray"):
        ks.ParameterServerStrategy(Resolver(ps=1), snapshot_seconds=1.0)
    with pytest.raises(ValueError, match="has no 'ps'"):
        ks.ParameterServerStrategy(Resolver())
    # Synchronous workers are made by `run`.
    with pytest.raises(ValueError, match=r"call `resolver\.run\(train\)`"):
        ks.MultiWorkerMirroredStrategy(Resolver())
