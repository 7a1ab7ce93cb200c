"""Models: their strategy, how they are built, and where their loops stand."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_strategies.keras_compat.updates import optimizers_of
from keras_strategies.keras_compat.variables import raw_value

STRATEGY_ATTRIBUTE = "_keras_strategies_strategy"


def base_trainer() -> Any:
    """`Trainer` of Keras 3.15, which 3.16 calls `BaseTrainer`."""
    from keras.src.trainers import trainer

    return getattr(trainer, "BaseTrainer", None) or trainer.Trainer


@contextlib.contextmanager
def portable_optimizer(model: Any) -> Iterator[None]:
    """Saves a model's optimizer as one that every backend has.

    Keras 3.15 on Torch: an optimizer is of a class in `keras.src.backend.torch`, and a
    file that says so makes an optimizer for Torch tensors on any backend.
    """
    optimizers = [getattr(model, "optimizer", None)]
    changed = []
    while optimizers:
        optimizer = optimizers.pop()
        kind = type(optimizer)
        if kind.__module__.startswith("keras.src.backend."):
            public = next(
                c
                for c in kind.__mro__
                if c.__module__.startswith("keras.src.optimizers.")
            )
            object.__setattr__(optimizer, "__class__", public)
            changed.append((optimizer, kind))
        optimizers += optimizers_of(optimizer)
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizers.append(optimizer.inner_optimizer)
    try:
        yield
    finally:
        for optimizer, kind in changed:
            object.__setattr__(optimizer, "__class__", kind)


def strategy_of(made: Any) -> Any:
    """The strategy that a model or variable was made under; None without one."""
    return made.__dict__.get(STRATEGY_ATTRIBUTE)


def seed_states(model: Any) -> list[Any]:
    """The variables of a model's seed generators.

    Keras 3.15: `SeedGenerator.state` is a variable of this name. Keras saves what
    layers own, which these are not.
    """
    return [v for v in model.variables if v.name == "seed_generator_state"]


def is_built(layer: Any) -> bool:
    """Whether a layer and all its sublayers have their variables.

    Keras 3.15: `Layer._flatten_layers`, as `Trainer._symbolic_build` uses it.
    """
    return all(sublayer.built for sublayer in layer._flatten_layers())


def compiled_parts(model: Any) -> tuple[Any, Any]:
    """The metrics and the loss that `compile` has made; None where it was not called.

    Keras 3.15: `Trainer._compile_metrics`, `_compile_loss`.
    """
    names = ("_compile_metrics", "_compile_loss")
    metrics, loss = (getattr(model, name, None) for name in names)
    return metrics, loss


def is_unbuilt(model: Any) -> bool:
    """Whether `Trainer._symbolic_build` of Keras 3.15 will look at a batch."""
    parts = compiled_parts(model)
    unbuilt = [part for part in parts if part is not None and not part.built]
    return bool(unbuilt) or not is_built(model)


def creates_metrics(model: Any) -> bool:
    """Whether the first step of a compiled model makes variables of metrics.

    Keras 3.15: `CompileLoss` has a metric for each of several losses, none for one.
    """
    metrics, loss = model._compile_metrics, model._compile_loss
    is_new = metrics is not None and not metrics.built
    if loss is None or loss.built:
        return is_new
    outputs = getattr(model, "outputs", None) or [None]
    is_one = len(outputs) == 1 and not isinstance(loss._user_loss, (list, tuple, dict))
    return is_new or not is_one


def first_batch(iterator: Any) -> Any:
    """The first batch of an epoch iterator, which Keras resets after building."""
    for _, _, batches in iterator:
        return batches[0] if isinstance(batches, (list, tuple)) else next(batches)
    return None


def element_spec(adapter: Any) -> Any:
    """The `element_spec` of the tf.data dataset behind an adapter, None without one.

    Keras 3.15: `TFDatasetAdapter._dataset`.
    """
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    if isinstance(adapter, TFDatasetAdapter):
        return adapter._dataset.element_spec
    return None


def symbolic_build(model: Any, batch: Any) -> None:
    """Builds model, losses, metrics and optimizer from the shapes of a batch.

    Keras 3.15: `Trainer._symbolic_build(data_batch=...)`, which reads `shape` and
    `dtype` of the leaves only.
    """
    model._symbolic_build(data_batch=batch)


def all_variables(model: Any) -> list[Any]:
    """The variables of a model, its optimizer and its metrics, each once."""
    found = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        found += model.optimizer.variables
    found += getattr(model, "metrics_variables", [])
    unique = {id(variable): variable for variable in found}
    return [v for v in unique.values() if raw_value(v) is not None]


def build_optimizer(model: Any) -> None:
    """Makes the optimizer's variables of a built model, which `fit` does at once."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and model.built and not optimizer.built:
        optimizer.build(model.trainable_variables)


def initial_epoch(model: Any) -> int:
    """The epoch that `fit` begins with, where a backup has been restored.

    Keras 3.15: `BackupAndRestore` sets `_initial_epoch`.
    """
    return int(getattr(model, "_initial_epoch", 0) or 0)


def set_initial_epoch(model: Any, epoch: int) -> None:
    model._initial_epoch = epoch


def skip_steps(
    model: Any,
    count: int,
    logs: dict[str, float],
    metrics: Any,
    at_end: Callable[[], None],
) -> None:
    """Makes the next calls of `model.train_function` read batches and do nothing else.

    Keras 3.15: `fit` calls it with a list of batches on Torch, an iterator on
    TensorFlow, and a state and an iterator on JAX, of which the metrics' variables are
    the fourth part.

    Args:
        model: a model whose `fit` has begun.
        count: int, how many calls.
        logs: dict, what they return.
        metrics: the values of the metrics' variables afterwards.
        at_end: called after the last one.
    """
    original = model.train_function
    per_call = int(model.steps_per_execution)
    left = count
    backend = keras.backend.backend()

    def passed() -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            model.train_function = original
            at_end()
        return left == 0

    def restore() -> None:
        for variable, value in zip(model.metrics_variables, metrics, strict=True):
            variable.assign(value)

    def on_torch(data: Any) -> Any:
        if passed():
            restore()
        return logs

    def on_tensorflow(iterator: Any) -> Any:
        for _ in itertools.islice(iterator, per_call):
            pass
        if passed():
            restore()
        return logs

    def on_jax(state: Any, iterator: Any) -> Any:
        for _ in itertools.islice(iterator, per_call):
            pass
        if passed():
            values = [
                keras.ops.convert_to_tensor(value, variable.dtype)
                for variable, value in zip(
                    model.metrics_variables, metrics, strict=True
                )
            ]
            state = (*state[:3], values)
        return logs, state

    functions = {"torch": on_torch, "tensorflow": on_tensorflow, "jax": on_jax}
    model.train_function = functions[backend]
