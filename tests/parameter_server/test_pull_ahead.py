"""Values that are asked for ahead: which updates they miss, and that none is lost."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.parameter_server.wire.step_messages import StepReply, StepRequest
from keras_strategies.parameter_server.wire.task_messages import ScheduledTask
from keras_strategies.parameter_server.worker.pull_ahead import (
    PrefetchedStep,
    PullAheadQueue,
)
from keras_strategies.parameter_server.worker.step_execution import PullPlan
from parameter_server import clusters

pytestmark = pytest.mark.one_backend

IDS, ROWS, BATCH, STEPS, EPOCHS = 8, 500, 64, 12, 3


class ServerConnections:
    """Two servers that note what they are asked, and answer in order."""

    def __init__(self):
        self.log = []
        self.fails = False

    def send_steps(self, steps):
        self.log.append(dict(steps))
        return {server: len(self.log) for server in steps}

    def receive_steps(self, numbers):
        if self.fails:
            raise ValueError("no such slot")
        return {s: StepReply([], [], version) for s, version in numbers.items()}


def ahead(task, index, *servers):
    pulls = {server: StepRequest(pull=((index, 0),)) for server in servers}
    return PrefetchedStep(task, index, PullPlan(pulls=pulls))


def push(number):
    return StepRequest(update=(0, number), done=7)


def test_a_push_takes_the_next_pull_along():
    servers, confirmed = ServerConnections(), []
    pipeline, task = PullAheadQueue(servers), ScheduledTask(0, 0, [])
    steps = [ahead(task, 1, 0), ahead(task, 2, 0, 1)]
    pipeline.send({0: push(0), 1: push(0)}, steps, confirmed.append)
    # One message with both, and one that fills the pipeline.
    first, second = servers.log
    assert first[0] == StepRequest(update=(0, 0), done=7, pull=((1, 0),))
    assert first[1] == push(0)
    assert second == {s: StepRequest(pull=((2, 0),)) for s in (0, 1)}
    assert pipeline.is_waiting and not confirmed
    pipeline.await_replies()
    assert not pipeline.is_waiting
    assert [sorted(found) for found in confirmed] == [[0, 1]]
    plan, pulled = pipeline.take(task, 1)
    assert plan is steps[0].plan and pulled[0].version == 1
    _, pulled = pipeline.take(task, 2)
    assert {s: answer.version for s, answer in pulled.items()} == {0: 2, 1: 2}
    assert pipeline.take(task, 3) is None


def test_another_step_than_was_expected_begins_anew():
    servers = ServerConnections()
    pipeline, task = PullAheadQueue(servers), ScheduledTask(0, 0, [])
    confirmed = []
    pipeline.send(
        {0: push(0)}, [ahead(task, 1, 0), ahead(task, 2, 0)], confirmed.append
    )
    pipeline.await_replies()
    pipeline.send({0: push(1)}, [ahead(task, 3, 0)], confirmed.append)
    assert pipeline.take(ScheduledTask(1, 0, []), 0) is None
    assert len(pipeline) == 0
    # What was pushed is confirmed all the same.
    pipeline.await_replies()
    assert len(confirmed) == 2


def test_a_push_does_not_wait_for_the_reply_to_the_one_before():
    servers, confirmed = ServerConnections(), []
    pipeline, task = PullAheadQueue(servers), ScheduledTask(0, 0, [])
    first = [ahead(task, 1, 0), ahead(task, 2, 0)]
    pipeline.send({0: push(0)}, first, lambda found: confirmed.append(0))
    # Both requests are of the last push.
    pipeline.await_replies(wait_last=False)
    assert pipeline.is_waiting and not confirmed
    pipeline.await_replies()
    for i in (1, 2, 3):
        assert pipeline.take(task, i) is not None
        pipeline.send(
            {0: push(i)},
            [ahead(task, i + 2, 0)],
            lambda found, i=i: confirmed.append(i),
        )
        pipeline.await_replies(wait_last=False)
        # The next step has its values, which came with the push before.
        assert not pipeline.is_waiting
        assert confirmed == list(range(i))
    pipeline.send({0: push(4)}, [], lambda found: confirmed.append(4))
    pipeline.await_replies(wait_last=False)
    assert confirmed == [0, 1, 2, 3]
    pipeline.await_replies()
    assert confirmed == [0, 1, 2, 3, 4]


def test_an_error_does_not_lose_the_answers_after_it():
    servers, confirmed = ServerConnections(), []
    pipeline = PullAheadQueue(servers)
    pipeline.send({0: push(0)}, [], confirmed.append)
    servers.fails = True
    with pytest.raises(ValueError, match="no such slot"):
        pipeline.await_replies()
    servers.fails = False
    pipeline.send({0: push(1)}, [], confirmed.append)
    pipeline.await_replies()
    assert len(confirmed) == 1


def build(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((IDS,), dtype="int32"),
            # The rows of a batch are more than what a socket carries.
            keras.layers.Embedding(ROWS, 64),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.3), "mse", **options)
    return model


def data():
    random = np.random.default_rng(0)
    x = random.integers(0, ROWS, (BATCH * STEPS, IDS), dtype="int32")
    return x, random.normal(size=(len(x), 1)).astype("float32")


def trained(model, x, y, missed):
    """Weights after each step was computed with what lacked so many updates."""
    weights = model.get_weights()
    history = [weights]
    for i in range(STEPS):
        # The first step of a call has nothing to miss.
        stale = history[-1 - missed] if i else history[-1]
        model.set_weights(stale)
        rows = slice(i * BATCH, (i + 1) * BATCH)
        model.train_on_batch(x[rows], y[rows])
        after = model.get_weights()
        weights = [w + a - s for w, a, s in zip(weights, after, stale, strict=True)]
        history.append(weights)
    return weights


@pytest.mark.nightly(unless=["True-1"])
@pytest.mark.multiprocess
@pytest.mark.parametrize(("pull_ahead", "missed"), [(True, 1), (False, 0)])
def test_a_step_misses_the_update_before_it_and_no_other(pull_ahead, missed):
    x, y = data()
    reference = build()
    with clusters.start(workers=1, ps=1, pull_ahead=pull_ahead) as strategy:
        with strategy.scope():
            model = build(steps_per_execution=STEPS)
        model.set_weights(reference.get_weights())
        for _ in range(EPOCHS):
            # All steps of a call are known from the beginning, so that nothing
            # depends on who is faster; it is done when the servers have all updates.
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
            reference.set_weights(trained(reference, x, y, missed))
            for ours, expected in zip(
                clusters.values(model.weights), reference.get_weights(), strict=True
            ):
                np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)
        [worker] = strategy.cluster.scheduler.workers.values()
        assert worker.most_staleness == missed
        assert worker.staleness == EPOCHS * missed * (STEPS - 1)


@pytest.mark.multiprocess
@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_steps_read_their_own_values_from_shared_memory(steps_per_execution):
    x, _ = data()
    reference = build()
    with clusters.start(workers=1, ps=2) as strategy:
        with strategy.scope():
            model = build(steps_per_execution=steps_per_execution)
        model.set_weights(reference.get_weights())
        # Without updates the outputs do not depend on when the values were read.
        for _ in range(EPOCHS):
            np.testing.assert_allclose(
                model.predict(x, batch_size=BATCH, verbose=0),
                reference.predict(x, batch_size=BATCH, verbose=0),
                rtol=1e-5,
                atol=1e-6,
            )


@pytest.mark.multiprocess
def test_what_is_wrong_with_a_later_step_costs_no_update_before_it():
    x, y = data()
    x[2 * BATCH] = ROWS  # In the third batch.
    with clusters.start(workers=1, ps=1) as strategy:
        with strategy.scope():
            model = build(steps_per_execution=STEPS)
        with pytest.raises(ks.errors.InvalidArgumentError, match=f"Row {ROWS} of"):
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        assert int(keras.ops.convert_to_numpy(model.optimizer.iterations)) == 2
