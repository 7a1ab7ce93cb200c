"""What steps travel over: ZeroMQ, or Ray, which `test_local_cluster.py` trains with."""

from __future__ import annotations

import pytest

import keras_strategies as ks


@pytest.mark.parametrize(
    ("channel", "cluster", "message"),
    [
        ("flight", None, "'zeromq', 'ray'"),
        (
            "ray",
            {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]},
            "named addresses have no Ray",
        ),
    ],
)
def test_channels_that_cannot_be(channel, cluster, message) -> None:
    resolver = cluster and ks.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0
    )
    with pytest.raises(ks.errors.InvalidArgumentError, match=message):
        ks.ParameterServerStrategy(resolver, channel=channel)
