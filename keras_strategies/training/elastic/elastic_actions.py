"""Actions of elastic workers: repeated in the next generation when one is lost."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar, cast

from keras_strategies.cluster import first_causes
from keras_strategies.cluster.group.membership import Membership
from keras_strategies.cluster.group.worker_group import WorkerGroup
from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.group_actions import WRITERS, GroupActions
from keras_strategies.errors import WorkerError
from keras_strategies.keras_compat.hooks import MethodRestart
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.lead.client_state import JoinedGeneration
from keras_strategies.runtime.drivers import Drivers, RollbackDriver
from keras_strategies.runtime.state.model_values import model_state, restore_model
from keras_strategies.runtime.state.variable_sync import are_synced, set_synced
from keras_strategies.training.elastic.chief_callbacks import (
    ChiefCallback,
    ChiefCallbacks,
)
from keras_strategies.training.elastic.elastic_fit import ElasticFit
from keras_strategies.training.elastic.loop_steps import Change, Function, LoopSteps
from keras_strategies.training.resume.input_position import (
    random_state,
    set_random_state,
)
from keras_strategies.training.resume.snapshot_files import packed, parsed

T = TypeVar("T")

_logger = logging.getLogger("keras_strategies.elastic")
# Name of what a new worker receives.
_STATE = "the state of training"


class ElasticActions(GroupActions):
    """The actions of this process.

    Args:
        membership: the elastic group.
    """

    def __init__(self, membership: Membership):
        #: The elastic group.
        self.membership = membership
        self._workers: list[Communicator] = []
        self._strategies: list[weakref.ref[Any]] = []
        #: The number of finished actions.
        self._done = 0
        self._result: Any = None
        # Random numbers after the last finished action. Later ones, such as those that
        # shuffle an epoch, are drawn by each worker itself.
        self._random: dict[str, Any] | None = None
        # The model of the last finished action that had one.
        self._model: weakref.ref[Any] | None = None
        # Whether this worker has the state after its last finished action.
        self._is_clean = True
        # The last finished action and the state after it, of a worker that joins again.
        self._kept: tuple[int, bytes] | None = None
        #: bool, whether an action is under way.
        self.is_inside = False
        self._is_new = False
        self._fit: ElasticFit | None = None
        self._fits = 0
        self.loop: LoopSteps = LoopSteps(self)
        # Held while waits are aborted, so that those of the next generation are not.
        self._ending = threading.Lock()

    def register(self, workers: Communicator) -> None:
        """Adds the communicator of a strategy, which follows the generations."""
        self._workers.append(workers)
        self._watch(self.membership.group)

    def follow(self, strategy: Any) -> None:
        """Adds a strategy; its replicas follow the generations."""
        self._strategies.append(weakref.ref(strategy))

    @property
    def _first(self) -> Communicator | None:
        """The communicator of the first strategy; None before."""
        return next((each for each in self._workers if each.has_replicas), None)

    @property
    def _all_drivers(self) -> list[Drivers]:
        strategies = (reference() for reference in self._strategies)
        return [each.drivers for each in strategies if each is not None]

    @property
    def driver(self) -> RollbackDriver:
        """The driver of the first strategy."""
        return _rollback(self._all_drivers[0])

    @property
    def has_joined(self) -> bool:
        """bool, whether this worker is in the group of the others."""
        return self.membership.is_member

    @property
    def is_new(self) -> bool:
        return self._is_new

    @property
    def is_in_fit(self) -> bool:
        """bool, whether a `fit` has begun."""
        return self._fit is not None

    @property
    def generation(self) -> object:
        """A different object for each group of workers."""
        return self.membership.group

    # Methods of models

    def begin_method(self, name: str) -> None:
        if name == "fit":
            self.loop.is_active = False
        elif name == "train_on_batch" and not self.is_in_fit:
            # Also the first call of a loop tells of a worker that is lost in it.
            self.loop.is_active = True

    def own_callbacks(self, name: str, callbacks: list[Any]) -> list[Any]:
        return [
            ChiefCallback(each, self._is_chief) if isinstance(each, WRITERS) else each
            for each in callbacks
        ]

    def following_callbacks(
        self, name: str, callbacks: list[Any], verbose: Any, times: Any
    ) -> list[Any]:
        following = ChiefCallbacks(callbacks, verbose, self._is_chief)
        return (
            [ElasticFit(self._begin_fit, self._end_fit, following, times)]
            if name == "fit"
            else []
        )

    def _is_chief(self) -> bool:
        return self.membership.group.is_chief and self.has_joined

    # Actions

    def step(self, model: Any, kind: str, take: Callable[[], Any]) -> Any:
        admits = kind == "train" and self._fit is not None
        driver = _rollback(strategy_of(model).drivers)
        return self._run_step(
            take, lambda: driver.save_state(model, kind), model, admits
        )

    def call(self, what: str, call: Callable[[], T], model: Any = None) -> T:
        return cast(T, self._run_step(call, lambda: _nothing_to_undo, model, False))

    def prepare(self, call: Callable[[], T]) -> T:
        if self.is_inside or not self.has_joined:
            return call()
        found: list[T] = []
        while not found:
            self._is_interrupted(lambda: found.append(call()), None)
        return found[0]

    def await_chief(self, wait: Callable[[bool], None], model: Any) -> bool:
        if self.is_inside or not self.has_joined:
            wait(False)
            return True
        again = False
        while not self._is_chief():
            if not self._is_interrupted(functools.partial(wait, again), model):
                return True
            again = True
        return False

    def confirm_chief(self, model: Any) -> None:
        if self.is_inside or not self.has_joined:
            return
        while self._is_interrupted(lambda: self.membership.group.await_lease(), model):
            pass
        if not self._is_chief():
            raise WorkerError(
                "The others had no heartbeat of this worker while it saved a file, and "
                "another worker has become the chief, which saves it. Restart this "
                "worker."
            )

    def _is_interrupted(self, wait: Callable[[], None], model: Any) -> bool:
        """Whether the group has changed in a wait between actions."""
        with self.inside():
            change = self._try_step(wait, lambda: _nothing_to_undo, model, False, 0)
        if change is not None and self.loop.is_active:
            raise self.loop.changed(change)
        return change is not None

    def _run_step(
        self,
        take: Callable[[], Any],
        save_state: Callable[[], Callable[[], bool]],
        model: Any,
        admits: bool,
    ) -> Any:
        if self.is_inside or not self.has_joined:
            return take()
        begun = self._done
        with self.inside():
            while self._done == begun:
                change = self._try_step(
                    lambda: self._finish(take()), save_state, model, admits
                )
                if change is not None and self.loop.is_active:
                    raise self.loop.changed(change)
            if model is not None:
                self._model = weakref.ref(model)
            return self._result

    def loop_call(
        self,
        take: Callable[[], T],
        save_state: Callable[[], Callable[[], bool]],
        function: Function,
    ) -> T:
        """See `loop_steps.Actions`."""
        found: list[T] = []

        def call() -> None:
            found.append(take())
            if function.exchanges:
                self._finish(None)

        self.membership.group.progress = f"step {self.loop.step + 1} of the loop"
        with self.inside():
            change = self._try_step(call, save_state, None, function.trains)
        if change is not None:
            raise self.loop.changed(change)
        return found[0]

    def _try_step(
        self,
        take: Callable[[], None],
        save_state: Callable[[], Callable[[], bool]],
        model: Any,
        admits: bool,
        actions: int = 1,
    ) -> Change | None:
        """Takes `actions`; returns the change of the group that has undone them."""
        counts = [workers.steps.count for workers in self._workers]
        restore = save_state()
        try:
            if not admits or self.membership.group.begin_step():
                self.membership.group.check()
                take()
                return None
        except WorkerError:
            if not self.membership.is_broken():
                raise
            self._is_clean = restore()
            for workers, count in zip(self._workers, counts, strict=True):
                workers.steps.count = count
        return self._reform(model, admits, actions)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Entered around an action."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    def _finish(self, result: Any) -> None:
        self._done += 1
        self.membership.client.step = self._done
        self._result = result
        self._random = random_state()
        self._is_new = False

    # Generations

    def _watch(self, group: WorkerGroup) -> None:
        group.on_loss(lambda loss: self._end_waits(group))
        if group.loss() is not None:
            self._end_waits(group)

    def _end_waits(self, group: WorkerGroup) -> None:
        with self._ending:
            for workers in self._workers:
                if workers.group is group:
                    workers.end_waits()

    def _reform(self, model: Any, admits: bool, actions: int) -> Change:
        """Forms generations until one has the same state on all of its workers.

        A worker receives the results of as many `actions` that it is behind.
        """
        progress = self.membership.group.progress
        lost: set[int] = set()
        joined: set[int] = set()
        while True:
            if self._fit is not None and self.membership.client.is_excluded:
                self._begin_again(model)
            step = self._done if self._is_clean else None
            try:
                generation = self.membership.reform(step, admits=admits)
            except WorkerError as error:
                saved = "Nothing was saved."
                if self._fit is not None and self._is_clean:
                    saved = self._fit.save()
                raise WorkerError(f"{error.text} {saved}") from error
            missed = (generation.step or 0) - self._done
            if self._fit is not None and generation.is_behind and missed > actions:
                # The others have taken more actions without this worker.
                self._begin_again(model)
            lost = (lost | set(generation.lost)) - set(generation.joined)
            joined |= set(generation.joined)
            if self._replaced(model, generation):
                break
        count = len(generation.members)
        change = Change(tuple(sorted(lost)), tuple(sorted(joined)), count)
        if generation.rank == 0 and (lost or joined):
            at = f" at {progress}" if progress else ""
            total = self.membership.settings.workers
            _logger.warning(
                f"{change}{at}; training continues with {count} of {total} workers."
            )
        self._drop_checks(model, bool(joined))
        if self._fit is not None:
            self._fit.reformed()
        return change

    def _drop_checks(self, model: Any, has_new: bool) -> None:
        for drivers in self._all_drivers:
            if drivers.rollback is not None:
                drivers.rollback.reformed(model, has_new)

    def _begin_again(self, model: Any) -> NoReturn:
        """Ends the `fit` of a worker that then joins the others in a new one.

        They have taken steps without it, for example while this process was stopped.
        Its state is kept until it has a newer one.
        """
        assert self._fit is not None
        if not self._fit.can_begin_again:
            self.membership.leave("its input cannot be read again")
            raise WorkerError(
                "The other workers had no heartbeat of this worker for too long and "
                "train without it. It cannot rejoin in this process, since its input "
                "cannot be read again from the start. Restart this worker."
            )
        if self._is_clean:
            finished = model if self._model is None else self._model()
            self._kept = self._done, packed(self._state(finished))
        self._fit, self._is_clean = None, True
        self._fits -= 1
        self.membership.begin_alone()
        self._replace()
        self._drop_checks(model, True)
        raise MethodRestart("fit")

    def _replaced(self, model: Any, generation: JoinedGeneration) -> bool:
        """Whether a generation has begun; False if a worker was lost meanwhile."""
        try:
            self._replace()
            self._synchronize(model, generation)
            self.membership.confirm()
        except WorkerError:
            if not self.membership.is_broken():
                raise
            return False
        return True

    def _replace(self) -> None:
        group = self.membership.group
        with self._ending:
            # A thread may still abort the waits of the previous generation.
            for workers in self._workers:
                group.progress = workers.group.progress
        for workers in self._workers:
            workers.replace(group)
        for drivers in self._all_drivers:
            drivers.run.workers_changed()
        self._watch(group)

    def _synchronize(self, model: Any, generation: JoinedGeneration) -> None:
        """Sends the state of the chief, with all finished actions, to those behind."""
        workers = self._first
        if workers is None or not generation.behind:
            # Without a strategy there is no state.
            return
        own = b""
        # In all actions: a worker may be behind by a step of the model.
        finished = None if self.loop.is_active or not self._model else self._model()
        if generation.rank == 0:
            own = packed(self._state(model if finished is None else finished))
        found = workers.broadcast_bytes(_STATE, own)
        if generation.is_behind:
            state = parsed(found)
            state["random"] = state["finished"]
            self._receive(finished if model is None else model, state)

    def _state(self, model: Any) -> dict[str, Any]:
        if model is not None:
            strategy_of(model).engine.sync_variables(model)
        return {
            "done": self._done,
            "result": self._result,
            "steps": [workers.steps.count for workers in self._workers],
            "random": random_state(),
            "finished": self._random or random_state(),
            "model": None if model is None else model_state(model),
            "synced": None if model is None else are_synced(strategy_of(model), model),
            "fit": None if self._fit is None else self._fit.capture(),
            "fits": self._fits,
            "loop": None if self._fit is not None else self.loop.capture(),
        }

    def _receive(self, model: Any, state: dict[str, Any]) -> None:
        if model is not None and state["model"] is not None:
            strategy_of(model).engine.sync_variables(model)
            restore_model(model, state["model"])
            set_synced(strategy_of(model), model, state["synced"])
        if state["loop"] is not None:
            self.loop.receive(state["loop"])
        set_random_state(state["random"])
        self._random = state["random"]
        for workers, count in zip(self._workers, state["steps"], strict=True):
            workers.steps.count = count
        self._done, self._result = state["done"], state["result"]
        self._is_clean = True

    # New workers

    def _begin_fit(self, fit: ElasticFit) -> dict[str, Any] | None:
        """See `ElasticFit`."""
        self._fit = fit
        self._fits += 1
        if self.has_joined:
            return None
        state = self._join()[1]
        if state["fit"] is None:
            self._refuse("a custom loop", "`fit`")
        if state["fits"] != self._fits:
            theirs = f"call {state['fits']} of `fit`"
            self._refuse(theirs, f"call {self._fits} of `fit`")
        return state

    def join_loop(self) -> Change:
        """Joins the others in a custom loop, as a new worker.

        Raises:
            WorkerError: if they are in `fit`.
        """
        generation, state = self._join()
        if state["loop"] is None:
            self._refuse("`fit`", "a custom loop")
        members = generation.members
        return Change((), (members[generation.rank],), len(members))

    def _join(self) -> tuple[JoinedGeneration, dict[str, Any]]:
        while True:
            step = None if self._kept is None else self._kept[0]
            generation = self.membership.reform(step)
            try:
                state = self._joined(generation)
                self.membership.confirm()
                self._kept = None
                return generation, state
            except WorkerError:
                if not self.membership.is_broken():
                    raise

    def _joined(self, generation: JoinedGeneration) -> dict[str, Any]:
        self._replace()
        own = b"" if self._kept is None else self._kept[1]
        assert self._first is not None
        if generation.behind:
            sent = self._first.broadcast_bytes(_STATE, own)
            own = sent if generation.is_behind else own
        state: dict[str, Any] = parsed(own)
        self._receive(None, state)
        # It may have taken a step alone, which is not one of the group's.
        self._drop_checks(None, True)
        self._is_new = True
        return state

    def _refuse(self, theirs: str, own: str) -> NoReturn:
        """Ends this worker, which has joined in another part of the script."""
        # The others, which may wait for it in a collective, continue without it.
        self.membership.leave(f"it has joined in {own}")
        raise WorkerError(
            f"This worker has joined in {own}, but the other workers are in {theirs}. "
            "Skip finished parts of the script, so that a new worker reaches "
            f"{theirs} first."
        )

    def _end_fit(self) -> None:
        self._fit = None

    def saving(self, path: str) -> Callable[[], None]:
        done = self._done
        return lambda: self.membership.client.report_snapshot(done, path)

    def leave(self) -> None:
        failure = first_causes.recorded()
        self.membership.leave("" if failure is None else failure.text)


def _nothing_to_undo() -> bool:
    return True


def _rollback(drivers: Drivers) -> RollbackDriver:
    assert drivers.rollback is not None
    return drivers.rollback
