"""Methods of a strategy's models: their context, arguments, steps and files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategies.communication.communicator import loop_of
from keras_strategies.engines import get_engine
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.models.building import (
    empty_predictions,
    has_custom_step,
)
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.materialized import materialized_model
from keras_strategies.runtime import context
from keras_strategies.runtime.drivers import Drivers
from keras_strategies.runtime.row_splits import batches_of_custom_step
from keras_strategies.timeline import recording
from keras_strategies.training import worker_training
from keras_strategies.training.model_input import model_arguments
from keras_strategies.training.parallel_share import with_parallel_share
from keras_strategies.training.saving.atomic_files import atomic_save


@contextlib.contextmanager
def method(model: Any, name: str) -> Iterator[None]:
    """Entered around `fit`, `evaluate`, ... and `compile`."""
    strategy = strategy_of(model)
    is_short = name.endswith("on_batch")
    if name != "compile":
        _check_not_in_program(model, name)
    recording.start()
    with (
        recording.METHOD,
        context.entered(strategy),
        batches_of_custom_step(has_custom_step(model)),
        contextlib.nullcontext() if is_short else patching.installed_while("scope"),
        strategy.drivers.fit.method(model, name),
        worker_training.method(strategy, model, name),
        empty_predictions() if name == "predict" else contextlib.nullcontext(),
    ):
        yield


def _check_not_in_program(model: Any, name: str) -> None:
    """Raises in a program, in which optimizers would be built and state be traced."""
    if not get_engine().in_program():
        return
    raise ContextError(
        f"`{name}` of model {model.name!r} was called in a function that is compiled, "
        "as by `tf.function`, `jax.jit` or `ks.function`. It reads batches and returns "
        f"numbers, which a program cannot. Call `{name}` outside of the function, or "
        "in it the model itself, `model(x, training=...)`."
    )


def arguments(model: Any, name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Inside of `method`: the arguments to change, by name."""
    strategy = strategy_of(model)
    changed = model_arguments(strategy, name, given)
    changed |= with_parallel_share(strategy, name, given | changed)
    all_of_them = given | changed
    return changed | worker_training.arguments(
        strategy, model, name, all_of_them, given
    )


def call(model: Any, name: str, original: Any, bound: Any) -> Any:
    """Inside of `method`: calls `original(*bound.args, **bound.kwargs)`."""
    servers = drivers_of(model).servers
    if servers is not None:
        return servers.call(model, name, original, bound)
    strategy = strategy_of(model)
    if strategy is None or not name.endswith("on_batch"):
        return original(*bound.args, **bound.kwargs)
    loop = loop_of(strategy.workers)
    return loop.call(name, lambda: original(*bound.args, **bound.kwargs))


def step_function(
    model: Any, kind: str, make: Callable[[bool], Any], force: bool
) -> None:
    """Makes `model.{kind}_function`, in place of `make(force)`, Keras's method."""
    if getattr(model, f"{kind}_function") is None or force:
        drivers_of(model).fit.step_function(model, kind, lambda: make(force))
        if drivers_of(model).servers is None:
            function = getattr(model, f"{kind}_function")
            setattr(model, f"{kind}_function", recording.recorded_step(function))


def reads_results(model: Any) -> None:
    """Called before `fit` or `evaluate` reads the results of metrics."""
    servers = drivers_of(model).servers
    if servers is not None:
        servers.reads_results(model)


def drivers_of(model: Any) -> Drivers:
    """The drivers of a model's strategy."""
    drivers: Drivers = strategy_of(model).drivers
    return drivers


# Files.


def saves(model: Any, path: Any) -> bool:
    """Whether this process writes the files of a model that is saved.

    If not, another one has written them when this returns.
    """
    workers = strategy_of(model).workers
    if workers is None or workers.is_chief:
        return True
    with _reading(model):
        pass
    name = _path_text(path)

    def wait(again: bool) -> None:
        workers.group.wait_saved(name, again=again)

    return not workers.actions.await_chief(wait, model)


@contextlib.contextmanager
def writing(model: Any, path: Any) -> Iterator[Any]:
    """Entered around the writing of a file; returns the path to write to.

    Args:
        model: the model that is saved.
        path: the argument of `save`.
    """
    with (
        recording.SAVE,
        _reported(model, path),
        _reading(model),
        atomic_save(path) as target,
    ):
        yield target
        if (workers := strategy_of(model).workers) is not None:
            workers.actions.confirm_chief(model)


def exporting(model: Any) -> contextlib.AbstractContextManager[None]:
    """Entered around `model.export`."""
    if drivers_of(model).servers is None:
        return contextlib.nullcontext()
    return materialized_model(model)


def _reading(model: Any) -> contextlib.AbstractContextManager[None]:
    """Entered on all workers while the chief saves a model."""
    sharding = drivers_of(model).sharding
    return contextlib.nullcontext() if sharding is None else sharding.reading(model)


@contextlib.contextmanager
def _reported(model: Any, path: Any) -> Iterator[None]:
    """Ends the wait of other workers for a file of the chief when it is complete."""
    workers = strategy_of(model).workers
    error = ""
    try:
        yield
    except BaseException as found:
        # Reading variables may raise the error of a step that has lost a worker.
        cause = found if workers is None else workers.cause(found)
        error = f"{type(cause).__name__}: {cause}"
        if cause is not found:
            raise cause from found
        raise
    finally:
        if workers is not None:
            workers.group.report_saved(_path_text(path), error)


def _path_text(path: Any) -> str:
    return os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
