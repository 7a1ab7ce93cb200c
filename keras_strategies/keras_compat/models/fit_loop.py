"""Parts of `fit`: epochs, callbacks, metrics and sample weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies.keras_compat.models.input_adapters import numpy_pass


def epoch_iterator(**arguments: Any) -> Any:
    """`EpochIterator` of Keras 3.15: any input as epochs of batches.

    Iterating it gives `(begin step, end step, iterator of batches)`.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    class NumpyEpochIterator(EpochIterator):
        def _get_iterator(self) -> Any:
            return numpy_pass(self.data_adapter)

    return NumpyEpochIterator(**arguments)


def callback_list(callbacks: Any, **arguments: Any) -> Any:
    """The `keras.callbacks.CallbackList` of the callbacks passed to `fit`."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(callbacks, **arguments)


def check_compiled(model: Any, method: str) -> None:
    """Raises Keras's own error for a model that was not compiled."""
    model._assert_compile_called(method)


def should_evaluate(model: Any, epoch: int, frequency: Any) -> bool:
    """Whether `fit` evaluates after an epoch (`Trainer._should_eval`)."""
    return bool(model._should_eval(epoch, frequency))


def metrics_or_logs(model: Any, logs: Any) -> dict[str, Any]:
    """The metrics' results, or a step's logs (`_get_metrics_result_or_logs`)."""
    return dict(model._get_metrics_result_or_logs(logs))


def logs_in_order(model: Any, logs: Any) -> Any:
    """The result of `evaluate` and `*_on_batch` (`_flatten_metrics_in_order`)."""
    return model._flatten_metrics_in_order(logs)


def split_for_validation(arrays: Any, share: float) -> Any:
    """`fit`'s `validation_split` (`array_slicing.train_validation_split`)."""
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.train_validation_split(arrays, validation_split=share)


def sample_weights(y: Any, class_weight: Any) -> Any:
    """Weights of samples by their class (`class_weight_to_sample_weights`)."""
    from keras.src.trainers.data_adapters import data_adapter_utils

    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def resumed_epoch(model: Any) -> int:
    """The epoch that `fit` resumes at; 0 if no backup has been restored.

    Keras 3.15: `BackupAndRestore` sets `_initial_epoch`.
    """
    return int(getattr(model, "_initial_epoch", 0) or 0)


def set_initial_epoch(model: Any, epoch: int) -> None:
    """Sets the epoch that `fit` resumes at."""
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
        model: a model in `fit`.
        count: int, number of calls.
        logs: dict, their return value.
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
