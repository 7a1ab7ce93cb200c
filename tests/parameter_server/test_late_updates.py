"""Updates that are made after the reply: no worker waits for one, and none is lost."""

from __future__ import annotations

import numpy as np
import pytest

from keras_strategies.coordinator.server import ParameterServer, Step

KEY = (0, 0)


@pytest.fixture
def server(tmp_path) -> ParameterServer:
    made = ParameterServer(0, str(tmp_path))
    made.handle(("begin", "me"))
    made.handle(("create", [(KEY, np.zeros(2, "float32"))]))
    return made


def push(server, worker, closure, number=0, done=0, optimizers=()):
    """A step that adds 1 and pulls the part; what it gets, and the answer."""
    adds = ((KEY, np.ones(2, "float32")),)
    step = Step(
        update=(closure, number),
        done=done,
        optimizers=optimizers,
        adds=adds,
        pull=(KEY,),
        worker=worker,
    )
    answer = server.handle(("step", step, "me"))
    return float(answer.dense[0][0]), answer


def read(server) -> float:
    return float(server.handle(("read", (KEY, 0, 2)))[0])


def test_a_worker_is_answered_before_its_update_is_made(server) -> None:
    value, answer = push(server, worker=0, closure=1)
    assert value == 0 and (answer.version, answer.pushed) == (0, 1)
    value, answer = push(server, worker=1, closure=2)
    assert value == 0 and (answer.version, answer.pushed) == (0, 2)
    # At most one update of each worker waits.
    value, answer = push(server, worker=0, closure=3)
    assert value == 1 and (answer.version, answer.pushed) == (1, 3)
    assert read(server) == 3


def test_without_a_worker_an_update_comes_before_the_reply(server) -> None:
    push(server, worker=0, closure=1)
    value, answer = push(server, worker=None, closure=2)
    assert value == 2 and (answer.version, answer.pushed) == (2, 2)


def test_an_update_that_waits_counts_once(server) -> None:
    push(server, worker=0, closure=1)
    # Worker 0 has died, and worker 1 runs its closure again.
    push(server, worker=1, closure=1)
    # The closure is done for the coordinator before the update has been made.
    push(server, worker=1, closure=2, done=2)
    push(server, worker=2, closure=3, done=3)
    assert read(server) == 3


def test_snapshots_have_updates_that_waited(server, tmp_path) -> None:
    push(server, worker=0, closure=1)
    server.handle(("snapshot", None))
    again = ParameterServer(0, str(tmp_path))
    again.handle(("begin", "me"))
    push(again, worker=1, closure=1)
    assert read(again) == 1


def test_an_error_in_an_update_that_waited_comes_with_the_next_step(server) -> None:
    class Optimizer:
        fails = False

        def apply(self, dense, rows) -> None:
            if self.fails:
                raise ValueError("no such slot")

    server._updaters[7] = optimizer = Optimizer()
    # The first update of an optimizer is made at once: it shows whether it works.
    value, _ = push(server, 0, 1, optimizers=((7, [], []),))
    assert value == 1
    optimizer.fails = True
    value, _ = push(server, 0, 2, optimizers=((7, [], []),))
    assert value == 1
    server.finish()
    with pytest.raises(ValueError, match="no such slot"):
        push(server, 1, 3)
    value, _ = push(server, 1, 4)
    assert value == 1
