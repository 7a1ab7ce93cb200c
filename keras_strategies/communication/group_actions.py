"""The calls in which workers of a group exchange values, and what repeats them.

# Actions

An *action* is a call in which workers exchange values: a step of `fit`, `evaluate` or
`predict`, or an agreement between steps. All workers take the same actions in the same
order. In a group whose workers are fixed, each is taken once (`FixedActions`). Where
workers come and go, another implementation of `GroupActions` repeats what a lost worker
has interrupted:

1. a thread of the group calls `Communicator.end_waits`, so that the action ends with a
   `WorkerError` in the main thread of every other worker;
2. the state before the action is restored (`RollbackDriver.save_state`);
3. the next generation of the group is formed, and `Communicator.replace` is called
   with its group;
4. workers that are one action behind, and new ones, receive the state of a worker with
   the most actions: `RollbackDriver.values` there, `set_values` on the others;
5. `RollbackDriver.reformed` is called, and the action is repeated, with the same batch.

All but 1 happens in the thread that calls `fit`, inside the action.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import keras

if TYPE_CHECKING:
    from keras_strategies.cluster.group import WorkerGroup

T = TypeVar("T")

#: Callbacks that write or read files: on one worker only.
WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)


class CustomLoop(abc.ABC):
    """The calls of custom loops of a process: `run`, `reduce`, `*_on_batch`, ..."""

    @property
    @abc.abstractmethod
    def generation(self) -> object:
        """A different object for each group of workers."""

    @abc.abstractmethod
    def call(self, fn: Any, take: Callable[[], T], *, exchanges: bool = True) -> T:
        """Makes a call of a custom loop.

        Args:
            fn: the function of the loop that is called, or a name.
            take: makes the call.
            exchanges: bool, False if workers exchange values only in calls inside it.

        Raises:
            WorkersChanged: if the group has changed.
        """

    @abc.abstractmethod
    def check_program(self) -> None:
        """Raises where a call in a program of the user's cannot be made."""

    @abc.abstractmethod
    def created(self, variable: Any) -> None:
        """Called when a variable was created under a strategy of these workers."""

    @abc.abstractmethod
    def training(self) -> None:
        """Called when an optimizer is applied, also while a program is traced."""


class FixedLoop(CustomLoop):
    """Custom loops of fixed workers: calls are made as they are."""

    @property
    def generation(self) -> object:
        return None

    def call(self, fn: Any, take: Callable[[], T], *, exchanges: bool = True) -> T:
        return take()

    def check_program(self) -> None:
        pass

    def created(self, variable: Any) -> None:
        pass

    def training(self) -> None:
        pass


class GroupActions(abc.ABC):
    """The actions of one worker of a group; `Communicator.actions`."""

    #: bool, whether workers stay the same; otherwise an action may be repeated with
    #: others, and what it changes must be restorable.
    is_fixed = False
    #: The custom loops of this process.
    loop: CustomLoop

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
            `RollbackDriver.set_values` assigned the variables.

        Raises:
            WorkerError: if there are too few workers for too long.
        """

    @abc.abstractmethod
    def call(self, what: str, call: Callable[[], T], model: Any = None) -> T:
        """Takes an action between steps.

        Args:
            what: str, for messages.
            call: callable without effects on this process, except on variables of the
                model; its result is JSON or arrays, equal on all workers.
            model: the model of the variables that it assigns, if any.

        Returns:
            The result of `call`, here or on the worker with the most actions.
        """

    @abc.abstractmethod
    def prepare(self, call: Callable[[], T]) -> T:
        """Makes a call before the first action, such as a part of a strategy.

        Args:
            call: callable; it is repeated if a worker is lost, after
                `Communicator.replace`. It has no effects, or those that `replace` has,
                or it ends with an exchange of values by the group, after which all
                workers have made it.
        """

    @abc.abstractmethod
    def await_chief(self, wait: Callable[[bool], None], model: Any) -> bool:
        """Waits, on another worker than the chief, for what the chief alone does.

        Args:
            wait: waits; the argument tells whether a wait before was interrupted.
            model: the model that is saved, for example.

        Returns:
            False if this worker has become the chief, and has to do it.
        """

    @abc.abstractmethod
    def confirm_chief(self, model: Any) -> None:
        """Called on the chief, before a file of it replaces another one.

        The others may have another chief if this process was stopped.

        Raises:
            WorkerError: if so.
        """

    @abc.abstractmethod
    def begin_method(self, name: str) -> None:
        """Called before a method of a model begins, such as `"fit"`."""

    @abc.abstractmethod
    def own_callbacks(self, name: str, callbacks: list[Any]) -> list[Any]:
        """Those callbacks of a method that run on this worker.

        Raises:
            InvalidArgumentError: for one that such a group does not support.
        """

    @abc.abstractmethod
    def following_callbacks(
        self, name: str, callbacks: list[Any], verbose: Any, times: Any
    ) -> list[Any]:
        """Callbacks that are added behind those of a method.

        Args:
            name: str, the method.
            callbacks: list, all others that run on this worker.
            verbose: the argument of the method.
            times: `DecisionTimes`, when workers share the chief's decisions.
        """

    @abc.abstractmethod
    def register(self, workers: Any) -> None:
        """Adds the communicator of a strategy, which follows the group.

        Args:
            workers: `Communicator`.
        """

    @abc.abstractmethod
    def follow(self, strategy: Any) -> None:
        """Adds a strategy; its replicas follow the group."""

    @abc.abstractmethod
    def saving(self, path: str) -> Callable[[], None]:
        """Called when a snapshot of the state after the last action is taken.

        Args:
            path: str, of its folder.

        Returns:
            callable without arguments, to be called when it is written.
        """

    @abc.abstractmethod
    def leave(self) -> None:
        """Leaves the group."""


class FixedActions(GroupActions):
    """The actions of a worker of a fixed group: each is taken once.

    Args:
        group: the connected workers.
    """

    is_fixed = True
    loop = FixedLoop()

    def __init__(self, group: WorkerGroup):
        self._group = group

    @property
    def has_joined(self) -> bool:
        return True

    @property
    def is_new(self) -> bool:
        return False

    def step(self, model: Any, kind: str, take: Callable[[], Any]) -> Any:
        return take()

    def call(self, what: str, call: Callable[[], T], model: Any = None) -> T:
        return call()

    def prepare(self, call: Callable[[], T]) -> T:
        return call()

    def await_chief(self, wait: Callable[[bool], None], model: Any) -> bool:
        wait(False)
        return True

    def confirm_chief(self, model: Any) -> None:
        pass

    def begin_method(self, name: str) -> None:
        pass

    def own_callbacks(self, name: str, callbacks: list[Any]) -> list[Any]:
        if self._group.is_chief:
            return callbacks
        own = [each for each in callbacks if not isinstance(each, WRITERS)]
        for callback in own:
            if hasattr(callback, "verbose"):
                callback.verbose = 0
        return own

    def following_callbacks(
        self, name: str, callbacks: list[Any], verbose: Any, times: Any
    ) -> list[Any]:
        return []

    def register(self, workers: Any) -> None:
        pass

    def follow(self, strategy: Any) -> None:
        pass

    def saving(self, path: str) -> Callable[[], None]:
        return lambda: None

    def leave(self) -> None:
        self._group.leave()
