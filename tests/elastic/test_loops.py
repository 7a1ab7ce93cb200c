"""Custom loops with workers that are lost and join end as on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from elastic import elastic_loop
from elastic.elastic_loop import STEPS
from elastic.elastic_training import ElasticCluster, Kill
from harness.training import ADAM_TOLERANCE

pytestmark = pytest.mark.multiprocess

SCRIPT = str(elastic_loop.__file__)


def assert_like_one_device(cluster: ElasticCluster) -> dict[int, Any]:
    """Fails if a worker's weights, losses or metric differ from those of one device."""
    found = cluster.results()
    expected = found.pop(-1)
    for each in found.values():
        for mine, other in zip(each["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(mine, other, ADAM_TOLERANCE, ADAM_TOLERANCE)
        np.testing.assert_allclose(each["auc"], expected["auc"], 1e-4, 1e-4)
        assert str(STEPS) in each["losses"]
        for step, loss in each["losses"].items():
            assert abs(loss - expected["losses"][step]) < 1e-4, step
    return found


IS_TORCH = keras.backend.backend() == "torch"

SOURCES = [
    # Elsewhere, programs are compiled for each group.
    "function" if IS_TORCH else pytest.param("function", marks=pytest.mark.nightly),
    pytest.param("run", marks=pytest.mark.nightly),
    pytest.param("on_batch", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("source", SOURCES)
def test_a_killed_worker_a_killed_chief_and_a_new_worker(cluster, source):
    elastic = cluster(
        kills=[Kill(2, 3, "begin"), Kill(0, 7, "end")], waits={"9": 1}, source=source
    )
    elastic.await_kill(2)
    elastic.await_kill(0)
    elastic.start(2, is_new=True)
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


@pytest.mark.nightly
@pytest.mark.parametrize("source", ["function", "run", "on_batch"])
@pytest.mark.parametrize("kill", PLACES, ids=str)
def test_a_worker_is_lost_anywhere(cluster, kill, source):
    elastic = cluster(kills=[kill], source=source)
    elastic.await_kill(kill.index)
    found = assert_like_one_device(elastic)
    for each in found.values():
        assert [change[1] for change in each["changes"]] == [[kill.index]]
