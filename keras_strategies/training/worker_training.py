"""Model methods on several workers: agreement, callbacks, random numbers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.cluster import first_causes
from keras_strategies.cluster.group import uncaught_errors
from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.worker_steps import SAME_DATA
from keras_strategies.errors import (
    ClusterError,
    InvalidArgumentError,
    WorkerError,
    WorkersChanged,
)
from keras_strategies.input.sampled_checksums import sampled_checksums
from keras_strategies.keras_compat.hooks import MethodRestart
from keras_strategies.keras_compat.models.fit_loop import (
    resumed_epoch,
    set_initial_epoch,
)
from keras_strategies.keras_compat.models.input_adapters import is_adapter
from keras_strategies.keras_compat.models.row_adapters import (
    has_own_rows,
    is_loader_adapter,
)
from keras_strategies.keras_compat.optimizers.optimizer_parts import variable_rate
from keras_strategies.runtime.state.variable_sync import sync_model
from keras_strategies.training.progress_bar import WorkerProgress, with_progress
from keras_strategies.training.random_sync import sync_random_numbers

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

_LOOPS = ("fit", "evaluate", "predict")
# Name of an array's values in comparisons.
_VALUES = "the values of `{}`"


@contextlib.contextmanager
def method(strategy: StrategyCore, model: Any, name: str) -> Iterator[None]:
    """Context manager around a method of a model, on every worker.

    Broadcasts new weights, and random numbers before a loop, from the chief; `fit`
    broadcasts all weights when training begins. Errors are reported to the other
    workers.
    """
    workers = strategy.workers
    if workers is None or name == "compile":
        yield
        return
    workers.actions.begin_method(name)
    with workers.method(name) as is_outermost:
        if is_outermost:
            # The script has handled an error of an earlier method.
            first_causes.forget()
        try:
            workers.actions.call(
                f"the beginning of {name}",
                lambda: _begin(strategy, model, name),
                model,
            )
            yield
        except (WorkerError, WorkersChanged, MethodRestart):
            raise
        except BaseException as error:
            cause = workers.cause(error)
            if cause is not error:
                raise cause from error
            if is_outermost:
                uncaught_errors.report(workers.group, error)
            raise


def _begin(strategy: StrategyCore, model: Any, name: str) -> None:
    assert strategy.workers is not None
    group = strategy.workers.group
    group.check()
    if name in _LOOPS:
        sync_random_numbers(strategy.engine, group)
    sync_model(strategy, model, all_of_them=False)


def arguments(
    strategy: StrategyCore,
    model: Any,
    name: str,
    given: dict[str, Any],
    data: dict[str, Any],
) -> dict[str, Any]:
    """Changes of a method's arguments, after checking that workers agree on them.

    Args:
        strategy: the strategy.
        model: the model.
        name: str, the method.
        given: dict of the arguments, with distributed input.
        data: dict of the arguments as the user has given them.

    Raises:
        ValueError: if data, batches, epochs or models differ between workers.
    """
    workers = strategy.workers
    if workers is None or name not in _LOOPS:
        return {}
    _agree(workers, model, name, given, data)
    # Arrays have been compared above; joined batches are equal by construction.
    x = given.get("x")
    is_compared = _is_arrays(x) or (is_adapter(x) and not is_loader_adapter(x))
    workers.steps.check("rows" if has_own_rows(x) else "" if is_compared else "batches")
    callbacks = given.get("callbacks")
    _check_backups(strategy, callbacks)
    changed: dict[str, Any] = {}
    if not workers.is_chief:
        changed["verbose"] = 0
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if name == "fit":
            if not workers.actions.is_fixed:
                raise InvalidArgumentError(
                    "A CallbackList is not supported with elastic workers: output "
                    "moves to each new chief. Pass a list of callbacks."
                )
            sync_model(strategy, model, all_of_them=True)
        return changed
    mine = workers.actions.own_callbacks(name, _listed(callbacks))
    verbose = given.get("verbose", "auto")
    decisions = _ChiefDecisions(strategy, mine)
    if name == "fit":
        mine.append(decisions)
    if workers.is_chief or not workers.actions.is_fixed:
        bar = WorkerProgress(lambda: workers.group.count, lambda: workers.group.count)
        mine = with_progress(mine, verbose, bar)
    mine += workers.actions.following_callbacks(name, mine, verbose, decisions.times)
    changed["callbacks"] = [decisions.first, *mine] if name == "fit" else mine
    return changed


def _agree(
    workers: Communicator,
    model: Any,
    name: str,
    given: dict[str, Any],
    data: dict[str, Any],
) -> None:
    """Checks that arguments agree on all workers."""
    facts: dict[str, Any] = {"the method": name}
    for argument in ("batch_size", "epochs", "initial_epoch", "steps_per_epoch"):
        if argument in given:
            facts[f"`{argument}`"] = given[argument]
    for argument in ("x", "y", "sample_weight"):
        rows = _rows_of(given.get(argument))
        if rows is not None:
            facts[f"the rows of `{argument}`"] = rows
    facts["the model's variables (shapes and dtypes)"] = [
        [list(variable.shape), variable.dtype] for variable in model.variables
    ]
    optimizer = getattr(model, "optimizer", None)
    facts["the optimizer"] = type(optimizer).__name__
    facts["`steps_per_execution`"] = model.steps_per_execution
    for argument in ("x", "y", "sample_weight"):
        sampled = sampled_checksums(data.get(argument), argument)
        facts.update({_VALUES.format(leaf): sampled[leaf] for leaf in sampled})
    found = workers.gather_values(f"the arguments of {name}", facts)
    for what in facts:
        values = [each.get(what) for each in found]
        for other, value in enumerate(values):
            if value != values[0]:
                if what.startswith("the values of "):
                    raise ClusterError(
                        f"Workers have different data for `{name}`: {what} differ "
                        f"between worker 0 and worker {other}. {SAME_DATA}"
                    )
                raise ClusterError(
                    f"Workers disagree on {what}: worker 0 has {_short(values[0])}, "
                    f"worker {other} has {_short(value)}. Run the same script on the "
                    "same data on all workers; `batch_size` is the global batch."
                )


def _is_arrays(value: Any) -> bool:
    leaves = [leaf for leaf in keras.tree.flatten(value) if leaf is not None]
    return bool(leaves) and all(_rows_of(leaf) is not None for leaf in leaves)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 200 else f"{text[:200]}..."


def _rows_of(value: Any) -> int | None:
    """The rows of arrays; None for other input."""
    leaves = keras.tree.flatten(value) if isinstance(value, (dict, list, tuple)) else []
    first = leaves[0] if leaves else value
    shape = getattr(first, "shape", None)
    if shape is None or len(shape) == 0 or shape[0] is None:
        return None
    return int(shape[0])


def _listed(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(keras.tree.flatten(callbacks))


@dataclasses.dataclass
class DecisionTimes:
    """Times at which the chief's decisions are broadcast, besides ends of epochs.

    Args:
        each_batch: bool, whether also at the end of each batch.
    """

    each_batch: bool


class _FirstCallback(keras.callbacks.Callback):
    """Before the others: what they do after a batch is no wait for other workers."""

    def __init__(self, workers: Communicator):
        super().__init__()
        self._workers = workers

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.begun = self._workers.group.clock.begin_own()


class _ChiefDecisions(keras.callbacks.Callback):
    """Last callback: broadcasts the chief's decisions to all workers."""

    def __init__(self, strategy: StrategyCore, others: list[Any]):
        super().__init__()
        self._strategy = strategy
        assert strategy.workers is not None
        self._workers = strategy.workers
        self.times = DecisionTimes(any(map(_acts_on_batches, others)))
        self.first = _FirstCallback(self._workers)

    def on_train_begin(self, logs: Any = None) -> None:
        actions = self._workers.actions
        if actions.is_new:
            # The others have begun before.
            return
        # The chief may have restored a backup, and a worker alone have a callback.
        own = [resumed_epoch(self.model), self.times.each_batch]
        found = self._workers.gather_values("the first epoch", own)
        self.times.each_batch = any(acts for _, acts in found)
        set_initial_epoch(self.model, found[0][0])
        sync = functools.partial(sync_model, self._strategy, self.model, True)
        actions.call("the weights at the beginning", sync, self.model)
        self._decide("the beginning of training")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._workers.group.clock.end_own(self.first.begun)
        if self.times.each_batch:
            self._decide(f"the end of batch {batch}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._decide(f"the end of epoch {epoch}")

    def _decide(self, when: str) -> None:
        rate = variable_rate(getattr(self.model, "optimizer", None))
        own = [bool(self.model.stop_training), rate]
        stop, chiefs_rate = self._workers.gather_values(when, own)[0]
        self.model.stop_training = stop
        if chiefs_rate is not None and chiefs_rate != rate:
            self.model.optimizer.learning_rate = chiefs_rate


def _check_backups(strategy: StrategyCore, callbacks: Any) -> None:
    """Raises for `BackupAndRestore` with variables sharded over workers."""
    if strategy.placement.mesh is None:
        return
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    for callback in _listed(callbacks):
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise InvalidArgumentError(
                "keras.callbacks.BackupAndRestore was given to `fit` under "
                f"{strategy!r}, which shards variables over several workers, but "
                "only the chief writes and reads its file. Call "
                "`strategy.save_sharded(model, directory)` at the end of an epoch, "
                "and `load_sharded` before `fit`, with which every worker writes and "
                "reads its own shards; on TensorFlow `model.save_weights` and "
                "`load_weights`, on every worker."
            )


def _acts_on_batches(callback: Any) -> bool:
    """Whether a callback may stop training, or change the rate, after a batch.

    Of Keras's own callbacks only `LambdaCallback` may, by functions of the user.
    """
    names = ("on_train_batch_end", "on_batch_end")
    if type(callback).__module__.startswith("keras."):
        return any(name in vars(callback) for name in names)
    base = keras.callbacks.Callback
    return any(getattr(type(callback), n) is not getattr(base, n) for n in names)
