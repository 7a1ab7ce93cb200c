"""Interface of the loop that repeats calls of workers when their group has changed.

# Roles

An *action* is a call in which workers exchange values: a step of `fit`, `evaluate` or
`predict`, or an agreement between steps. All workers take the same actions in the same
order. `ElasticLoop` takes them, engine-neutral. When a worker is lost in an action:

1. a thread of the group calls `Communicator.end_waits`, so that the action ends with a
   `WorkerError` in the main thread of every other worker;
2. the loop restores the state before the action (`ElasticDriver.save_state`);
3. the loop forms the next generation (`Membership.reform`), and calls
   `Communicator.replace` with its group;
4. workers that are one action behind, and new ones, receive the state of a worker with
   the most actions: `ElasticDriver.values` there, `set_values` on the others;
5. `ElasticDriver.reformed` is called, and the action is repeated, with the same batch.

All but 1 happens in the thread that calls `fit`, inside the action.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class ElasticLoop(abc.ABC):
    """The actions of one worker of an elastic group; `Communicator.elastic`."""

    @property
    @abc.abstractmethod
    def has_joined(self) -> bool:
        """bool, whether this worker is in the group of the other workers.

        Until it reaches `fit`, a new worker is the only member of its own group.
        """

    @property
    @abc.abstractmethod
    def is_new(self) -> bool:
        """bool, whether this worker has joined and not yet taken a step."""

    @abc.abstractmethod
    def step(self, model: Any, kind: str, take: Callable[[], Any]) -> Any:
        """Takes a step of a method's loop, or several in one execution.

        Engines call it from the step functions of a model. The global batch is read
        before, once even if the step is repeated. `take` splits it over the
        current workers: it must read `Communicator.replica_counts` in each call, and
        must not call programs compiled for other workers.

        Args:
            model: the model.
            kind: str, "train", "test" or "predict".
            take: callable that takes the step and returns its logs (or predictions): a
                structure of dicts, lists, numbers and arrays, equal on all workers. It
                is called once for each attempt.

        Returns:
            The result of `take`. On a worker that was behind, the result of the worker
            that it received the state from: `take` was not completed here, and
            `ElasticDriver.set_values` assigned the variables.

        Raises:
            WorkerError: if there are fewer than `min_workers` for too long.
        """

    @abc.abstractmethod
    def call(self, what: str, call: Callable[[], T], model: Any = None) -> T:
        """Takes an action between steps.

        Args:
            what: str, for messages.
            call: callable without effects on this process, except on variables of the
                model; its result is JSON, equal on all workers.
            model: the model of the variables that it assigns, if any.

        Returns:
            The result of `call`, here or on the worker with the most actions.
        """
