"""Callback by which workers join a `fit` that is under way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies.input.sources import is_tf_data
from keras_strategies.keras_compat.models import fit_position
from keras_strategies.keras_compat.models.fit_loop import set_initial_epoch
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.runtime.state.model_values import check_model, restore_model
from keras_strategies.runtime.state.variable_sync import set_synced
from keras_strategies.training.elastic.chief_callbacks import ChiefCallbacks
from keras_strategies.training.resume.callback_states import (
    callback_states,
    restore_callbacks,
)
from keras_strategies.training.resume.input_position import InputPosition, Point
from keras_strategies.training.resume.resume_callback import Resume
from keras_strategies.training.worker_training import DecisionTimes


class ElasticFit(fit_position.OrderedCallback):
    """Position and callbacks of a `fit` of elastic workers.

    On a new worker, `fit` begins with the state of the others: finished epochs and
    steps are skipped.

    Args:
        begin: begins a `fit` with this object, which provides and follows its state;
            returns, on a new worker, what `capture` returned on one that trains.
        end: ends it.
        chief_callbacks: those that follow the chief.
        decisions: `DecisionTimes` of the workers.
    """

    def __init__(
        self,
        begin: Callable[[ElasticFit], dict[str, Any] | None],
        end: Callable[[], None],
        chief_callbacks: ChiefCallbacks,
        decisions: DecisionTimes,
    ):
        super().__init__()
        self._decisions = decisions
        self._begin, self._end = begin, end
        self._chief_callbacks = chief_callbacks
        self._others: list[Any] = []
        self._epochs: Any = None
        self._position: InputPosition | None = None
        # If there is one, it follows the position in the input.
        self._resume: Resume | None = None
        self._state: dict[str, Any] | None = None
        self._point = Point()
        self._epoch = 0
        #: int, the steps of the epoch after which callbacks were called.
        self.steps = 0
        fit_position.order_callbacks()

    def companion(self) -> keras.callbacks.Callback:
        return _First(self)

    def joined(self, others: list[Any], epochs: Any) -> None:
        self._others, self._epochs = others, epochs

    def begin(self) -> None:
        """Joins the others, before all other callbacks begin."""
        if self._epochs is None:
            return
        resumes = (each for each in self._others if isinstance(each, Resume))
        self._resume = next(resumes, None)
        if self._resume is not None:
            self._position = self._resume.open()
        else:
            self._position = InputPosition(
                self._epochs, "skip", lambda done: None, reorders=False
            )
        self._state = self._begin(self)
        if self._state is None:
            return
        fit_position.build_for_input(self.model, self._epochs)
        check_model(self.model, self._state["model"])
        self._point = Point(**self._state["fit"]["point"])
        self._position.check(self._point)

    def on_train_begin(self, logs: Any = None) -> None:
        if self._state is None or self._position is None:
            return
        self._restore()
        self._position.resume(self._point)
        set_initial_epoch(self.model, self._point.epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._state is not None:
            set_initial_epoch(self.model, 0)
            # Metrics were reset, and callbacks were called, as on the other workers.
            self._restore()
        self._state = None
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._position is not None and self._resume is None:
            self._position.end_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        self._end()

    def _restore(self) -> None:
        assert self._state is not None
        restore_model(self.model, self._state["model"])
        set_synced(strategy_of(self.model), self.model, self._state["synced"])
        self._decisions.each_batch = self._state["fit"]["each_batch"]
        states = self._state["fit"]["callbacks"]
        restore_callbacks(self._others, states, is_chief=False)

    # For `ElasticActions`

    @property
    def can_begin_again(self) -> bool:
        """bool, whether another `fit` with the same input reads the same batches."""
        # A shuffled `tf.data` pipeline does not repeat the order of a pass.
        is_stream = fit_position.is_stream(self._epochs)
        return not is_stream and not is_tf_data(fit_position.input_of(self._epochs))

    def capture(self) -> dict[str, Any]:
        """Position in the input and states of callbacks after the last step."""
        assert self._position is not None
        return {
            "point": dataclasses.asdict(self._position.in_epoch(self._epoch)),
            "callbacks": callback_states(self._others),
            "each_batch": self._decisions.each_batch,
        }

    def save(self) -> str:
        """Saves the state after the last step; returns a sentence with the result."""
        if self._resume is None or self._position is None:
            return (
                "Nothing was saved. With `ks.callbacks.Resume(directory)` in `fit`, "
                "training continues when the script is started again."
            )
        try:
            directory = self._resume.save(self._epoch, self.steps)
        except OSError as error:
            return f"A last snapshot could not be written: {error}."
        if directory is None:
            return "Training continues at the last snapshot when it is started again."
        return (
            f"The state after the last step was saved in {str(directory)!r}: training "
            "continues there when the script is started again."
        )

    def reformed(self) -> None:
        """Called when the group has changed."""
        self._chief_callbacks.follow()


class _First(keras.callbacks.Callback):
    """The part of `ElasticFit` that runs before all other callbacks."""

    def __init__(self, elastic: ElasticFit):
        super().__init__()
        self._elastic = elastic

    def on_train_begin(self, logs: Any = None) -> None:
        self._elastic.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._elastic.steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._elastic.steps = batch + 1
