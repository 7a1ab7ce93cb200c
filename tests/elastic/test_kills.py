"""Training with workers that are lost and join ends as on one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from elastic.elastic_training import (
    ENGINE_STARTS,
    ROWS,
    STEPS_PER_EPOCH,
    ElasticCluster,
    Kill,
)

from keras_strategies.cluster.group.exit_watchdog import GRACE

pytestmark = pytest.mark.multiprocess

BACKEND = keras.backend.backend()
NIGHTLY = pytest.mark.nightly

#: Exchanges between workers while a strategy is made: addresses of the engine's
#: services, their starts, the numbers of replicas, devices, random numbers.
EXCHANGES = {"jax": 7, "torch": 2, "tensorflow": 4}


def assert_like_one_device(cluster: ElasticCluster) -> dict[int, Any]:
    """Fails if a worker's weights, history or log differ from those of one device."""
    found, expected = cluster.like_one_device()
    for index, each in found.items():
        assert each["history"].keys() == expected["history"].keys()
        for name, values in expected["history"].items():
            np.testing.assert_allclose(
                each["history"][name], values, 1e-4, 1e-4, err_msg=f"{name} of {index}"
            )
    rows, others = (
        np.loadtxt(cluster.folder / name, delimiter=",", skiprows=1, ndmin=2)
        for name in ("log.csv", "one.csv")
    )
    np.testing.assert_allclose(rows, others, 1e-4, 1e-4)
    return found


def assert_two_losses_change_nothing(cluster: Any, **settings: Any) -> Any:
    """Worker 2 is killed, then the chief, and worker 2 joins again."""
    kills = [Kill(2, 3), Kill(0, 7, "end")]
    elastic = cluster(kills=kills, waits={"9": 1}, **settings)
    elastic.await_kills(2, 0)
    elastic.start_new(2)
    return assert_like_one_device(elastic), elastic.text()


@pytest.mark.slow(seconds=11)
@pytest.mark.parametrize(
    "source",
    [
        "arrays",
        pytest.param("rows", marks=NIGHTLY),
        pytest.param("loader", marks=[NIGHTLY] * (BACKEND != "torch")),
    ],
)
def test_a_killed_worker_a_killed_chief_and_a_new_worker(cluster, source):
    found, text = assert_two_losses_change_nothing(cluster, source=source)
    assert found[1]["trained"] == 6 * STEPS_PER_EPOCH
    # Its rows of three, two, one and two workers, and those of repeated steps.
    assert 0.4 * 6 * ROWS < found[1]["read"] < 0.65 * 6 * ROWS, found[1]["read"]
    # It joins at step 9 at the latest, and at the step that the kill has ended, 7 or 8,
    # if it is there when the others form again.
    assert 0 < found[2]["trained"] <= 6 * STEPS_PER_EPOCH - 6
    assert "worker 2 was lost at step 3 of fit" in text


@pytest.mark.one_backend
@pytest.mark.slow(seconds=11)
@pytest.mark.parametrize(
    ("index", "exchange"),
    [
        pytest.param(index, number, marks=[NIGHTLY] * (number != 2 or index > 0))
        for index in (0, 2)
        for number in range(1, EXCHANGES[BACKEND] + 1)
    ],
)
def test_a_worker_is_lost_while_strategies_are_made(cluster, index, exchange):
    elastic = cluster(kills=[Kill(index, exchange, "exchange")], epochs=2)
    elastic.await_kills(index)
    elastic.start_new(index)
    found = assert_like_one_device(elastic)
    assert found[1]["trained"] == 2 * STEPS_PER_EPOCH


@NIGHTLY
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("source", ["generator", "arrays"])
def test_a_worker_that_did_not_finish_a_step_takes_its_result(cluster, index, source):
    kills = [Kill(2, 3, "end")]
    elastic = cluster(kills=kills, unfinished=[(index, 3)], epochs=2, source=source)
    elastic.await_kills(2)
    found = assert_like_one_device(elastic)
    assert [found[i]["trained"] for i in (0, 1)] == [2 * STEPS_PER_EPOCH] * 2


@NIGHTLY
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("mixes_rows", [False, True])
def test_a_worker_that_is_slow_in_validation_is_one_step_behind_at_most(
    cluster, index, mixes_rows
):
    # Batches of 25 and 16 rows are not split over three devices of JAX. On Torch and
    # TensorFlow, a layer that mixes rows is not split; epoch 1 checks it.
    kills = [Kill(2, 2 * STEPS_PER_EPOCH, "epoch end")]
    elastic = cluster(kills=kills, lags=index, mixes_rows=mixes_rows, epochs=3)
    elastic.await_kills(2)
    assert_like_one_device(elastic)


@NIGHTLY
@pytest.mark.skipif(BACKEND != "jax", reason="the engine with an exit watchdog")
def test_a_worker_that_compiles_when_the_chief_is_lost_continues(cluster):
    """It waits for no one, and may take longer than a wait for a lost worker."""
    times = {"compiles": 2 * GRACE + 2, "timeout": 2 * GRACE}
    elastic = cluster(kills=[Kill(2, 3)], epochs=2, **times)
    elastic.await_kills(2, 0)
    found = assert_like_one_device(elastic)
    assert found[1]["trained"] == 2 * STEPS_PER_EPOCH


@NIGHTLY
@pytest.mark.skipif(BACKEND != "jax", reason="the engine that waits in its own code")
@pytest.mark.parametrize("function", ENGINE_STARTS)
def test_the_chief_is_lost_while_the_runtime_starts_again(cluster, function):
    """As when a worker is killed, and the chief moments later."""
    elastic = cluster(kills=[Kill(2, 3)], starting=function, epochs=2)
    elastic.await_kills(2, 0)
    found = assert_like_one_device(elastic)
    assert found[1]["trained"] == 2 * STEPS_PER_EPOCH


@pytest.mark.one_backend("jax")
def test_too_few_workers_are_an_error_after_a_wait(cluster):
    elastic = cluster(workers=2, kills=[Kill(1, 2)], min_workers=2, fails=1.0)
    elastic.await_kills(1)
    text = elastic.await_errors(0)
    assert "1 of 2 workers are connected after 1 s, without worker 1" in text
    assert "Nothing was saved. With `ks.callbacks.Resume(directory)` in `fit`" in text
    assert "At least 2 are needed (`ks.Elastic(min_workers=...)`)" in text


@pytest.mark.one_backend("torch")
def test_a_new_worker_in_another_fit_is_refused(cluster):
    elastic = cluster(workers=2, kills=[Kill(1, 3)], waits={"5": 1}, fits=2)
    elastic.await_kills(1)
    elastic.start_new(1)
    elastic.await_errors(1)
    assert_like_one_device(elastic)
    joined = "has joined in call 1 of `fit`, but the other workers are in call 2"
    assert joined in elastic.text()


@pytest.mark.parametrize("model", ["transformer", pytest.param("cnn", marks=NIGHTLY)])
@pytest.mark.one_backend("torch")
def test_random_numbers_are_those_of_one_device(cluster, model):
    """Of rows, on three, two, one and two workers."""
    assert_two_losses_change_nothing(cluster, epochs=3, model=model)


@NIGHTLY
@pytest.mark.skipif(BACKEND == "jax", reason="elastic steps place their batches")
@pytest.mark.one_backend("torch")
def test_batches_ahead_are_those_of_the_next_steps(cluster):
    assert_two_losses_change_nothing(cluster, ahead=True)


@NIGHTLY
def test_a_loss_that_mixes_rows_continues_when_a_worker_returns(cluster):
    elastic = cluster(kills=[Kill(2, 6)], waits={"8": 1}, sorts_rows=True)
    elastic.await_kills(2)
    elastic.start_new(2)
    assert_like_one_device(elastic)


@NIGHTLY
def test_several_steps_in_one_execution(cluster):
    found, _ = assert_two_losses_change_nothing(cluster, per_execution=2)
    assert found[1]["trained"] == 6 * STEPS_PER_EPOCH // 2


@NIGHTLY
@pytest.mark.one_backend("torch")
def test_training_resumes_after_too_few_were_left(cluster):
    kills = [Kill(0, 3), Kill(2, 7)]
    elastic = cluster(kills=kills, min_workers=2, fails=5.0, every_steps=100)
    elastic.await_kills(0, 2)
    text = elastic.await_errors(1)
    assert "At least 2 are needed (`ks.Elastic(min_workers=...)`)" in text
    assert f"was saved in '{elastic.folder / 'snapshots'}'" in text
    elastic.start_new(0, 1, 2)
    found = assert_like_one_device(elastic)
    trained = {each["trained"] for each in found.values()}
    # From the step in which the last worker was lost, which a worker may have finished:
    # on JAX, each computes all rows of a batch that does not divide.
    assert len(trained) == 1
    assert trained <= {6 * STEPS_PER_EPOCH - 6, 6 * STEPS_PER_EPOCH - 7}


@NIGHTLY
@pytest.mark.parametrize("steps", [(3, 6), (2, 13)])
def test_snapshots_continue_on_a_new_chief_and_after_total_loss(cluster, steps):
    first, second = steps
    kills = [Kill(0, first), Kill(1, second), Kill(2, second)]
    elastic = cluster(kills=kills, waits={str(second): 1}, every_steps=2)
    elastic.await_kills(0)
    elastic.start_new(0)
    elastic.await_kills(1, 2)
    elastic.processes.pop(0).kill()
    elastic.await_end_of_lead()
    elastic.start_new(0, 1, 2)
    found = assert_like_one_device(elastic)
    assert found[0]["trained"] < 6 * STEPS_PER_EPOCH


@NIGHTLY
def test_training_resumes_after_the_machine_of_the_lead_is_lost(cluster):
    elastic = cluster(kills=[Kill(0, 7, "lead")], every_steps=2, timeout=4.0)
    assert elastic.await_errors(0, 1, 2).count("has lost the lead at") >= 3
    elastic.start_new(0, 1, 2)
    found = assert_like_one_device(elastic)
    # The state after step 6 or 7: each worker saves its own, if it is newer.
    trained = {6 * STEPS_PER_EPOCH - after for after in (6, 7)}
    assert {each["trained"] for each in found.values()} <= trained


#: Places in which a worker is lost: the worker, the step and the place.
PLACES = [
    Kill(1, 2, "begin"),
    Kill(0, 4, "layer"),
    Kill(1, 4, "end"),
    Kill(0, 5, "begin"),
    Kill(2, 8, "validation"),
    Kill(0, 8, "validation"),
    Kill(0, 8, "epoch end"),
    Kill(1, 8, "epoch end"),
]


@NIGHTLY
@pytest.mark.parametrize("source", ["arrays", "generator", "rows"])
@pytest.mark.parametrize("kill", PLACES, ids=str)
def test_a_worker_is_lost_anywhere(cluster, kill, source):
    elastic = cluster(kills=[kill], epochs=3, source=source)
    elastic.await_kills(kill.index)
    assert_like_one_device(elastic)
    assert elastic.text().count(f"worker {kill.index} was lost at ") == 1


@NIGHTLY
@pytest.mark.parametrize("step", [1, 4, 5, 7])
@pytest.mark.parametrize("source", ["arrays", "generator", "rows"])
def test_a_worker_joins_anywhere(cluster, step, source):
    waits = {str(step + 1): 1}
    elastic = cluster(kills=[Kill(0, 1)], waits=waits, epochs=4, source=source)
    elastic.await_kills(0)
    elastic.start_new(0)
    found = assert_like_one_device(elastic)
    assert found[0]["trained"] < found[1]["trained"]
