"""Waits for JAX's coordination service end when a worker is lost."""

from __future__ import annotations

import threading

import keras
import pytest

from keras_strategies.errors import WorkerError
from keras_strategies.lead.state import Loss

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX backend", allow_module_level=True)

from keras_strategies.engines.jax.workers.service_waits import until_loss

LOSS = Loss(0, 0, "10.0.0.2", 77, "step 3 of fit", "its process ended")


class Group:
    """The part of a `WorkerGroup` that is used."""

    def __init__(self) -> None:
        self.lost: Loss | None = None

    def check(self) -> None:
        if self.lost is not None:
            raise WorkerError(str(self.lost))


def test_results_and_errors_arrive() -> None:
    assert until_loss(Group(), lambda: 7) == 7
    with pytest.raises(OSError, match="no route"):
        until_loss(Group(), lambda: (_ for _ in ()).throw(OSError("no route")))


def test_a_call_that_waits_is_left_when_a_worker_is_lost() -> None:
    group, answered, waits = Group(), threading.Event(), threading.Event()

    def call() -> str:
        waits.set()
        answered.wait(60)
        return "late"

    timer = threading.Thread(target=lambda: (waits.wait(60), lose(group)))
    timer.start()
    with pytest.raises(WorkerError, match=r"Worker 0 .* was lost at step 3 of fit"):
        until_loss(group, call)
    timer.join()
    answered.set()


def lose(group: Group) -> None:
    group.lost = LOSS
