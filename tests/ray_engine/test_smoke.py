"""Functions on workers that Ray starts on one node: places, results, errors."""

from __future__ import annotations

import os

import pytest

import keras_strategies as ks

# The processes of Ray take 13 seconds of a core; workers import no framework.
pytestmark = pytest.mark.multiprocess

NODES, NODE = 1, {"num_cpus": 2, "num_gpus": 2}


@pytest.mark.one_backend("jax")
@pytest.mark.slow(seconds=20)
def test_workers_have_places_results_and_errors(ray_nodes):
    resolver = ks.cluster_resolver.RayClusterResolver(
        ray_nodes.address,
        resources_per_worker={"CPU": 1, "GPU": 1},
        runtime_env={"env_vars": {"NUMBER": "5"}},
    )
    assert resolver.num_accelerators() == {"GPU": 1}
    folder = os.getpid()  # A closure, as functions in notebooks have them.

    def place(first, second=0):
        import os

        assert folder != os.getpid()
        own = ks.cluster_resolver.find_cluster()
        assert own.cluster_spec() == resolver.cluster_spec()
        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        number = int(os.environ["NUMBER"]) + first + second
        return own.task_type, resolver.task_id, resolver.num_workers, gpu, number

    found = resolver.run(place, (1,), {"second": 2})
    assert [(job, i, count, n) for job, i, count, _, n in found] == [
        ("worker", 0, 2, 8),
        ("worker", 1, 2, 8),
    ]
    assert {gpu for *_, gpu, _ in found} == {"0", "1"}

    def fails():
        if resolver.task_id == 1:
            raise KeyError("boom")
        import time

        time.sleep(600)

    with pytest.raises(KeyError, match="boom") as error:
        resolver.run(fails)
    (note,) = error.value.__notes__
    assert note.startswith("Raised in worker 1:")
    assert "in fails" in note

    larger = ks.cluster_resolver.RayClusterResolver(
        workers=3, resources_per_worker={"CPU": 2}, start_seconds=1
    )
    with pytest.raises(ks.errors.ClusterError) as error:
        larger.run(place)
    text = str(error.value)
    assert "no room for 3 workers with CPU 2 each (SPREAD) for 1 seconds" in text
    assert "has CPU 2, GPU 2" in text
    assert "Of all that, CPU 2, GPU 2" in text
