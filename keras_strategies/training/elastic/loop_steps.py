"""Steps of custom loops of elastic workers.

A *call* is an outermost `Strategy.run`, `ks.function`, `reduce`, `gather` or
`*_on_batch`. It is an action (`ElasticActions`) if workers exchange values in it, and a
step if it trains. An interrupted call is rolled back, and not repeated: the loop
continues at the step of `WorkersChanged`. A new worker takes its first step alone, to
create the variables that a step creates, and then joins the others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from keras_strategies.communication.group_actions import CustomLoop
from keras_strategies.errors import ContextError, WorkersChanged
from keras_strategies.runtime.compiled_functions import original_function
from keras_strategies.runtime.drivers import RollbackDriver
from keras_strategies.training.elastic.loop_variables import LoopVariables

T = TypeVar("T")


@dataclass(frozen=True)
class Change:
    """A change of the group.

    Args:
        lost: the numbers of the workers that were lost, in order.
        joined: those of the workers that have joined.
        workers: int, the number of workers in the new group.
    """

    lost: tuple[int, ...]
    joined: tuple[int, ...]
    workers: int

    def __str__(self) -> str:
        changes = [f"worker {index} was lost" for index in self.lost]
        changes += [f"worker {index} has joined" for index in self.joined]
        return " and ".join(changes)


@dataclass
class Function:
    """A function of a loop, and the effects of its calls.

    Args:
        exchanges: bool, whether workers exchange values in it.
        trains: bool, whether it updates weights.
        is_known: bool, whether it has been called.
    """

    exchanges: bool
    trains: bool = False
    is_known: bool = False


class Actions(Protocol):
    """The actions of this worker."""

    #: bool, whether an action is under way.
    is_inside: bool

    @property
    def is_in_fit(self) -> bool:
        """bool, whether a `fit` has begun."""

    @property
    def has_joined(self) -> bool:
        """bool, whether this worker is in the group of the others."""

    @property
    def generation(self) -> object:
        """A different object for each group of workers."""

    @property
    def driver(self) -> RollbackDriver:
        """The engine's driver for elastic workers."""

    def inside(self) -> contextlib.AbstractContextManager[None]:
        """Entered around an action."""

    def loop_call(
        self,
        take: Callable[[], T],
        save_state: Callable[[], Callable[[], bool]],
        function: Function,
    ) -> T:
        """Takes an action that is not repeated.

        Args:
            take: makes the call.
            save_state: see `RollbackDriver.save_state`.
            function: the function, with the effects of its calls.

        Raises:
            WorkersChanged: if the group has changed.
        """

    def join_loop(self) -> Change:
        """Joins the others in a custom loop, as a new worker."""


class LoopSteps(CustomLoop):
    """The calls of custom loops of an elastic worker.

    Args:
        actions: the actions of this worker.
    """

    def __init__(self, actions: Actions):
        self._actions = actions
        self._variables = LoopVariables()
        self._functions: dict[Any, Function] = {}
        self._current: Function | None = None
        # Functions that restore the values before the current call.
        self._restores: list[Callable[[], bool]] = []
        #: int, the finished steps of all loops.
        self.step = 0
        #: bool, whether a loop has begun, and no `fit` since.
        self.is_active = False

    @property
    def generation(self) -> object:
        return self._actions.generation

    def check_program(self) -> None:
        if not self._actions.is_inside:
            raise ContextError(
                "A method of a strategy with elastic workers was called in a "
                "`tf.function`: its program could not continue when workers are "
                "lost or join. Use `ks.function`, after the strategy is made."
            )

    def created(self, variable: Any) -> None:
        self._variables.add(variable)
        if self._current is not None and self._actions.has_joined:
            self._restores.append(self._actions.driver.save_variables([variable]))

    def training(self) -> None:
        if self._current is not None:
            self._current.trains = True

    def call(self, fn: Any, take: Callable[[], T], *, exchanges: bool = True) -> T:
        if self._actions.is_inside or self._actions.is_in_fit:
            if self._current is not None:
                self._current.exchanges |= exchanges
            return take()
        function = self._functions.setdefault(_key_of(fn), Function(exchanges))
        if function.is_known and not function.exchanges:
            return take()
        observed = functools.partial(self._observed, function, take)
        if not self._actions.has_joined:
            return self._alone(function, observed)
        self._restores.clear()
        try:
            return self._actions.loop_call(observed, self._save_state, function)
        finally:
            self._restores.clear()

    def _save_state(self) -> Callable[[], bool]:
        variables = list(self._variables.alive().values())
        self._restores.append(self._actions.driver.save_variables(variables))

        def restore() -> bool:
            are_restored = [each() for each in reversed(self._restores)]
            return all(are_restored)

        return restore

    def _observed(self, function: Function, take: Callable[[], T]) -> T:
        """Makes a call; the first one of a function shows whether it is a step."""
        weights = None if function.is_known else self._variables.weights()
        self._current = function
        try:
            result = take()
        finally:
            self._current = None
        if weights is not None:
            function.trains |= self._variables.have_changed(weights)
            function.is_known = True
        if function.trains:
            self.step += 1
            self.is_active = True
        return result

    def _alone(self, function: Function, take: Callable[[], T]) -> T:
        """A call of a new worker, which joins the others after its first step."""
        with self._actions.inside():
            result = take()
            if not function.trains:
                return result
            change = self._actions.join_loop()
        raise self.changed(change)

    def changed(self, change: Change) -> WorkersChanged:
        """The error for a change of the group."""
        count = change.workers
        return WorkersChanged(
            f"{str(change) or 'The group was formed again'} after step "
            f"{self.step} of the loop, which continues with {count} "
            f"worker{'s' * (count != 1)}. Catch `ks.WorkersChanged` around the loop, "
            "and begin again with the batch after its `step`.",
            step=self.step,
            lost=change.lost,
            joined=change.joined,
            workers=count,
        )

    # State for workers that need it.

    def capture(self) -> dict[str, Any] | None:
        """The state after the last call; None without a loop."""
        if not self.step:
            return None
        return {"step": self.step, "variables": self._variables.capture()}

    def receive(self, state: dict[str, Any]) -> None:
        """Assigns what `capture` returned on another worker."""
        self._variables.receive(state["variables"])
        self.step, self.is_active = state["step"], True


def _key_of(fn: Any) -> Any:
    """Equal for functions of the same code, such as lambdas of a loop."""
    fn = original_function(fn)
    while isinstance(fn, functools.partial):
        fn = fn.func
    other = fn if isinstance(fn, str) else type(fn)
    return getattr(getattr(fn, "__func__", fn), "__code__", None) or other
