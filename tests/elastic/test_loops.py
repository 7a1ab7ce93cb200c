"""Custom loops with workers that are lost and join end as on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from elastic import elastic_loop
from elastic.elastic_loop import STEPS
from elastic.elastic_training import ElasticCluster, Kill

pytestmark = pytest.mark.multiprocess

SCRIPT = str(elastic_loop.__file__)


def assert_like_one_device(cluster: ElasticCluster) -> dict[int, Any]:
    """Fails if a worker's weights, losses or metric differ from those of one device."""
    found, expected = cluster.like_one_device()
    for each in found.values():
        np.testing.assert_allclose(each["auc"], expected["auc"], 1e-4, 1e-4)
        assert str(STEPS) in each["losses"]
        for step, loss in each["losses"].items():
            assert abs(loss - expected["losses"][step]) < 1e-4, step
    return found


NIGHTLY = pytest.mark.nightly
SOURCES = [
    # Elsewhere, programs are compiled for each group.
    pytest.param("function", marks=[NIGHTLY] * (keras.backend.backend() != "torch")),
    pytest.param("run", marks=NIGHTLY),
    pytest.param("on_batch", marks=NIGHTLY),
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_killed_worker_a_killed_chief_and_a_new_worker(cluster, source):
    elastic = cluster(
        kills=[Kill(2, 3, "begin"), Kill(0, 7, "end")], waits={"9": 1}, source=source
    )
    elastic.await_kills(2, 0)
    elastic.start_new(2)
    found = assert_like_one_device(elastic)
    lost, *others = found[1]["changes"]
    assert lost == [2, [2], [], 2]
    # It may come while the others form a group again.
    in_turn, at_once = [[[0], [], 1], [[], [2], 2]], [[[0], [2], 2]]
    assert [each[1:] for each in others] in (in_turn, at_once)
    assert found[2]["changes"] == [[others[-1][0], [], [2], 2]]
    place = "the beginning of train" if source == "on_batch" else "step 3 of the loop"
    assert f"worker 2 was lost at {place}" in elastic.text()


#: Places in which a worker is lost; others than "layer" on every backend.
PLACES = [Kill(1, 1, "layer"), Kill(0, 4, "layer"), Kill(1, 4, "end"), Kill(0, 16)]


@NIGHTLY
@pytest.mark.parametrize("source", ["function", "run", "on_batch"])
@pytest.mark.parametrize("kill", PLACES, ids=str)
def test_a_worker_is_lost_anywhere(cluster, kill, source):
    elastic = cluster(kills=[kill], source=source)
    elastic.await_kills(kill.index)
    found = assert_like_one_device(elastic)
    for each in found.values():
        assert [change[1] for change in each["changes"]] == [[kill.index]]
