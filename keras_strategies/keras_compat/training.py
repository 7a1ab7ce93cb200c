"""The parts of `fit`, for loops whose steps are made elsewhere."""

from __future__ import annotations

from typing import Any


def epoch_iterator(**arguments: Any) -> Any:
    """`EpochIterator` of Keras 3.15: any input as epochs of batches.

    Iterating it gives `(begin step, end step, iterator of batches)`.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    class NumpyEpochIterator(EpochIterator):
        def _get_iterator(self) -> Any:
            return self.data_adapter.get_numpy_iterator()

    return NumpyEpochIterator(**arguments)


def callback_list(callbacks: Any, **arguments: Any) -> Any:
    """`keras.callbacks.CallbackList`, of what `fit` was given."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(callbacks, **arguments)


def check_compiled(model: Any, method: str) -> None:
    """Raises Keras's own error for a model that was not compiled."""
    model._assert_compile_called(method)


def should_evaluate(model: Any, epoch: int, frequency: Any) -> bool:
    """Whether `fit` evaluates after an epoch (`Trainer._should_eval`)."""
    return bool(model._should_eval(epoch, frequency))


def resumed_epoch(model: Any) -> Any:
    """The epoch that `BackupAndRestore` has restored (`Trainer._initial_epoch`)."""
    return model._initial_epoch


def metrics_or_logs(model: Any, logs: Any) -> dict[str, Any]:
    """The metrics' results, or what a step returned (`_get_metrics_result_or_logs`)."""
    return dict(model._get_metrics_result_or_logs(logs))


def logs_in_order(model: Any, logs: Any) -> Any:
    """What `evaluate` and `*_on_batch` return (`_flatten_metrics_in_order`)."""
    return model._flatten_metrics_in_order(logs)


def split_for_validation(arrays: Any, share: float) -> Any:
    """`fit`'s `validation_split` (`array_slicing.train_validation_split`)."""
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.train_validation_split(arrays, validation_split=share)


def sample_weights(y: Any, class_weight: Any) -> Any:
    """Weights of samples by their class (`class_weight_to_sample_weights`)."""
    from keras.src.trainers.data_adapters import data_adapter_utils

    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
