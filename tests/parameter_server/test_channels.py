"""Steps that travel over Ray instead of ZeroMQ."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks
from parameter_server import clusters


@pytest.mark.multiprocess
def test_training_over_ray_equals_one_device_and_survives_a_server(by_ray) -> None:
    x, y = clusters.clicks()
    alone = clusters.two_inputs(keras.optimizers.SGD(0.05, momentum=0.9))
    alone.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    with clusters.start(
        workers=1, ps=1, channel="ray", max_staleness=0, snapshot_seconds=60.0
    ) as strategy:
        with strategy.scope():
            model = clusters.two_inputs(keras.optimizers.SGD(0.05, momentum=0.9))
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        strategy.cluster.servers.ask(0, "snapshot")
        clusters.kill(strategy, "ps", 0)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        for ours, expected in zip(model.weights, alone.weights, strict=True):
            if "seed" not in ours.path:
                np.testing.assert_allclose(
                    keras.ops.convert_to_numpy(ours.value),
                    keras.ops.convert_to_numpy(expected.value),
                    rtol=1e-4,
                    atol=1e-5,
                )
        assert ks.ClusterCoordinator(strategy).status().bytes_per_step > 1000


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
