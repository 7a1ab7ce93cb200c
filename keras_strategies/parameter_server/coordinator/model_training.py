"""`fit`, `evaluate` and `predict` on the workers of a parameter server cluster.

The coordinator reads the input and schedules a task per batch, so that each batch is
used exactly once by any worker. Callbacks run on the coordinator, in the order of the
steps.
"""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from keras_strategies.errors import InputError, InvalidArgumentError
from keras_strategies.input.batches import as_numpy
from keras_strategies.input.row_splits import check_batch
from keras_strategies.keras_compat.models import fit_loop
from keras_strategies.keras_compat.models.building import is_unbuilt, symbolic_build
from keras_strategies.keras_compat.models.first_batches import first_batch
from keras_strategies.keras_compat.models.fit_loop import (
    callback_list,
    check_compiled,
    logs_in_order,
    metrics_or_logs,
    resumed_epoch,
    sample_weights,
    should_evaluate,
    split_for_validation,
)
from keras_strategies.parameter_server.coordinator.remote_functions import (
    ModelDefinition,
    RemoteFunctions,
)
from keras_strategies.parameter_server.coordinator.remote_values import RemoteValue
from keras_strategies.parameter_server.coordinator.scheduler import Scheduler
from keras_strategies.parameter_server.engines.composite_tensors import is_composite
from keras_strategies.training.progress_bar import WorkerProgress, with_progress

#: Tasks per worker that are scheduled ahead of their callbacks.
_WINDOW = 3
#: The same, while the callbacks wait for a slow worker.
_FAR_WINDOW = 64


class ModelTraining:
    """Keras's training methods, with steps on workers.

    Args:
        functions: sends models to workers and schedules their steps.
        scheduler: has the states of workers.
    """

    def __init__(self, functions: RemoteFunctions, scheduler: Scheduler):
        self._functions = functions
        self._scheduler = scheduler
        # The validation data of models in `fit`.
        self._validation: weakref.WeakKeyDictionary[Any, Any] = (
            weakref.WeakKeyDictionary()
        )

    def finish_steps(self) -> None:
        """Waits for the steps under way."""
        self._scheduler.tasks.wait_until_done()

    def fit(
        self,
        model: Any,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> Any:
        """As `keras.Model.fit`."""
        check_compiled(model, "fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = split_for_validation(
                (x, y, sample_weight), validation_split
            )
        epoch_iterator = _epoch_iterator(
            model,
            x=x,
            y=y,
            sample_weight=sample_weight,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            shuffle=shuffle,
            class_weight=class_weight,
        )
        _build(model, epoch_iterator)
        callbacks = self._callbacks(
            model, callbacks, verbose, epoch_iterator, epochs, add_history=True
        )
        self._validation.pop(model, None)
        model.stop_training = False
        logs: dict[str, Any] = {}
        callbacks.on_train_begin()
        first = resumed_epoch(model) or initial_epoch
        for epoch in range(first, epochs):
            model.reset_metrics()
            callbacks.on_epoch_begin(epoch)
            last = self._steps(
                model,
                "train",
                epoch_iterator,
                callbacks.on_train_batch_begin,
                callbacks.on_train_batch_end,
                lambda: model.stop_training,
            )
            logs = metrics_or_logs(model, last)
            if validation_data is not None and should_evaluate(
                model, epoch, validation_freq
            ):
                val_x, val_y, val_weight = _unpacked(validation_data)
                data = {
                    "x": val_x,
                    "y": val_y,
                    "sample_weight": val_weight,
                    "batch_size": validation_batch_size or batch_size,
                }
                if model not in self._validation:
                    # As in Keras, all evaluations go on with one iterator.
                    self._validation[model] = _epoch_iterator(
                        model, **data, steps_per_epoch=validation_steps
                    )
                found = model.evaluate(
                    **data,
                    steps=validation_steps,
                    callbacks=callbacks,
                    return_dict=True,
                    _use_cached_eval_dataset=True,
                )
                logs.update({f"val_{name}": value for name, value in found.items()})
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training:
                break
        if model.optimizer is not None and epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        self._validation.pop(model, None)
        callbacks.on_train_end(logs=logs)
        return model.history

    def evaluate(
        self,
        model: Any,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """As `keras.Model.evaluate`; each sample counts once."""
        check_compiled(model, "evaluate")
        is_validation = kwargs.pop("_use_cached_eval_dataset", False)
        if kwargs:
            raise InvalidArgumentError(
                f"`evaluate` received arguments that it does not have: {kwargs}. Pass "
                "only those of `keras.Model.evaluate`."
            )
        epoch_iterator = (
            self._validation[model]
            if is_validation
            else _epoch_iterator(
                model,
                x=x,
                y=y,
                sample_weight=sample_weight,
                batch_size=batch_size,
                steps_per_epoch=steps,
            )
        )
        _build(model, epoch_iterator)
        callbacks = self._callbacks(model, callbacks, verbose, epoch_iterator)
        model.stop_evaluating = False
        callbacks.on_test_begin()
        model.reset_metrics()
        last = self._steps(
            model,
            "test",
            epoch_iterator,
            callbacks.on_test_batch_begin,
            callbacks.on_test_batch_end,
            lambda: model.stop_evaluating,
        )
        logs = _python_numbers(metrics_or_logs(model, last))
        callbacks.on_test_end(logs)
        return logs if return_dict else logs_in_order(model, logs)

    def predict(
        self,
        model: Any,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """As `keras.Model.predict`; every row once, in order."""
        epoch_iterator = _epoch_iterator(
            model, x=x, batch_size=batch_size, steps_per_epoch=steps
        )
        callbacks = self._callbacks(model, callbacks, verbose, epoch_iterator)
        outputs: list[Any] = []

        def end(step: int, batch_outputs: list[Any]) -> None:
            outputs.extend(batch_outputs)
            callbacks.on_predict_batch_end(step, {"outputs": batch_outputs[-1]})

        model.stop_predicting = False
        callbacks.on_predict_begin()
        self._steps(
            model,
            "predict",
            epoch_iterator,
            callbacks.on_predict_batch_begin,
            end,
            lambda: model.stop_predicting,
        )
        callbacks.on_predict_end()
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *outputs)

    def train_on_batch(
        self,
        model: Any,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """As `keras.Model.train_on_batch`."""
        check_compiled(model, "train_on_batch")
        if class_weight is not None:
            if sample_weight is not None:
                raise InvalidArgumentError(
                    "Arguments `sample_weight` and `class_weight` cannot be specified "
                    f"at the same time. Received: sample_weight={sample_weight}, "
                    f"class_weight={class_weight}. Multiply the sample weights by "
                    "those of the classes, and pass only `sample_weight`."
                )
            sample_weight = sample_weights(y, class_weight)
        return self._on_batch(model, "train", (x, y, sample_weight), return_dict)

    def test_on_batch(
        self,
        model: Any,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """As `keras.Model.test_on_batch`."""
        check_compiled(model, "test_on_batch")
        return self._on_batch(model, "test", (x, y, sample_weight), return_dict)

    def predict_on_batch(self, model: Any, x: Any) -> Any:
        """As `keras.Model.predict_on_batch`."""
        batch = _on_host((x,))
        definition = self._functions.model_definition(model, "predict")
        (outputs,) = self._functions.schedule_steps(definition, [batch]).fetch()
        return outputs

    def _on_batch(
        self, model: Any, kind: str, batch: tuple[Any, ...], return_dict: bool
    ) -> Any:
        batch = _on_host(batch)
        symbolic_build(model, batch)
        # The metrics of a call are those of its batch.
        model.reset_metrics()
        definition = self._functions.model_definition(model, kind)
        logs = self._functions.schedule_steps(definition, [batch]).fetch()
        logs = _python_numbers(metrics_or_logs(model, logs))
        return logs if return_dict else logs_in_order(model, logs)

    def _callbacks(
        self,
        model: Any,
        callbacks: Any,
        verbose: Any,
        epoch_iterator: Any,
        epochs: int = 1,
        add_history: bool = False,
    ) -> Any:
        """The Keras callback list of a method of a model."""
        return callback_list(
            self._with_progress(callbacks, verbose),
            add_history=add_history,
            add_progbar=verbose != 0,
            verbose=verbose,
            epochs=epochs,
            steps=epoch_iterator.num_batches,
            model=model,
        )

    def _with_progress(self, callbacks: Any, verbose: Any) -> Any:
        scheduler = self._scheduler
        bar = WorkerProgress(
            lambda: sum(w.is_alive for w in list(scheduler.workers.values())),
            lambda: len(scheduler.workers),
        )
        return with_progress(callbacks, verbose, bar)

    # Steps

    def _steps(
        self,
        model: Any,
        kind: str,
        epoch_iterator: Any,
        begin: Callable[[int], None],
        end: Callable[[int, Any], None],
        is_stopped: Callable[[], bool],
    ) -> Any:
        """Runs one pass over the data; returns the last step's result."""
        scheduler = self._scheduler
        in_flight: collections.deque[tuple[int, RemoteValue]] = collections.deque()
        last: Any = {}
        # As in Keras, the layers at the start of training count.
        definition: ModelDefinition | None = None

        def finish_first() -> None:
            nonlocal last
            step, value = in_flight.popleft()
            last = value.fetch()
            scheduler.tasks.emit_warnings()
            end(step, last)

        try:
            for first, final, batches in epoch_iterator:
                begin(first)
                group = list(_take(batches, model.steps_per_execution))
                if not group:
                    break
                if definition is None:
                    definition = self._functions.model_definition(model, kind)
                value = self._functions.schedule_steps(definition, group)
                in_flight.append((final, value))
                window = _WINDOW * len(scheduler.workers)
                far = _FAR_WINDOW * len(scheduler.workers)
                if scheduler.max_staleness is not None:
                    window = far = min(window, scheduler.max_staleness + 1)
                while len(in_flight) >= window and not is_stopped():
                    if len(in_flight) < far and not scheduler.tasks.wait_for_room(
                        in_flight[0][1].is_done
                    ):
                        # A slow worker runs the first task; the others continue.
                        break
                    finish_first()
                if is_stopped():
                    break
            while in_flight:
                finish_first()
        except BaseException:
            scheduler.abandon()
            raise
        return last


def _epoch_iterator(model: Any, *, shuffle: bool = False, **data: Any) -> Any:
    """The Keras iterator over the batches of one pass."""
    return fit_loop.epoch_iterator(
        shuffle=shuffle, steps_per_execution=model.steps_per_execution, **data
    )


def _build(model: Any, epoch_iterator: Any) -> None:
    """Builds a model on the shapes of the first batch."""
    batch = None
    if is_unbuilt(model):
        batch = first_batch(epoch_iterator)
        if batch is None:
            raise InputError(
                f"Model {model.name!r} is built from the shapes of the first batch, "
                "but the input is empty. Pass at least one batch."
            )
        batch = _on_host(batch)
        check_batch(batch)
    symbolic_build(model, batch)
    epoch_iterator.reset()


def _take(batches: Iterable[Any], count: int) -> Iterable[Any]:
    for batch in itertools.islice(batches, count):
        batch = _on_host(batch)
        check_batch(batch)
        yield batch


def _on_host(batch: Any) -> Any:
    """A batch of NumPy arrays and composite tensors, without trailing None."""
    parts = list(batch) if isinstance(batch, (tuple, list)) else [batch]
    while parts and parts[-1] is None:
        parts.pop()
    return tuple(
        keras.tree.map_structure(
            lambda leaf: (
                leaf
                if leaf is None or is_composite(leaf)
                else _contiguous(as_numpy(leaf))
            ),
            part,
        )
        for part in parts
    )


def _contiguous(array: Any) -> Any:
    if array.dtype == np.float64:
        # As Keras converts it.
        array = array.astype(keras.config.floatx())
    return np.ascontiguousarray(array) if array.ndim else array


def _unpacked(data: Any) -> Any:
    if isinstance(data, (tuple, list)):
        return keras.utils.unpack_x_y_sample_weight(tuple(data))
    return data, None, None


def _python_numbers(logs: dict[str, Any]) -> dict[str, Any]:
    def number(value: Any) -> Any:
        try:
            return float(keras.ops.convert_to_numpy(value))
        except (TypeError, ValueError):
            return value

    return {name: number(value) for name, value in logs.items()}
