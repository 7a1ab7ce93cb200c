"""Trainings of a script, on one device or under a strategy, and what they compute."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.models.building import is_unbuilt, symbolic_build
from keras_strategies.keras_compat.optimizers.gradient_recorder import GradientRecorder
from keras_strategies.keras_compat.variables.generator_seeds import (
    create_global_generator,
    is_seed_state,
)
from keras_strategies.runtime.state.model_values import copied_value
from keras_strategies.training.resume.resume_callback import Resume
from keras_strategies.values import PerReplica
from keras_strategies.verification.batches import Batch, fit_arguments, read_batches
from keras_strategies.verification.layer_outputs import model_of_outputs

Step = Callable[[Any, Any, Any], Any]
_SERVER_RATE = 2.0**10
#: Kinds of things that are compared, in the order of computation.
KINDS = (
    "setting",
    "dtype policy",
    "batch",
    "declaration",
    "output",
    "loss",
    "metric",
    "gradient",
    "slot",
    "variable",
    "metric state",
    "random state",
    "copy",
)


@dataclass(frozen=True)
class Script:
    """What is verified: see `ks.verify`."""

    build: Callable[[], Any]
    data: Any
    step: Step | None
    steps: int
    seed: int
    resume_after: int | None = None
    kill_after: int | None = None
    is_elastic: bool = False
    on_servers: bool = False

    @property
    def interrupted_after(self) -> int | None:
        """int or None, the step after which `fit` is interrupted in some way."""
        return self.kill_after if self.resume_after is None else self.resume_after

    @property
    def is_resumed(self) -> bool:
        """Whether `ks.callbacks.Resume` continues `fit`, and no other workers."""
        return self.interrupted_after is not None and not self.is_elastic


#: The epoch and the step of it.
Position = tuple[int, int]
#: A kind, and the number of a value of that kind: names count up within a process.
Key = tuple[str, int]


@dataclass
class Observed:
    """Values by kind and number, in the order of computation.

    Args:
        values, names, dtypes: dicts.
        trained: set of the keys of trainable variables.
    """

    values: dict[Key, np.ndarray] = field(default_factory=dict)
    names: dict[Key, str] = field(default_factory=dict)
    dtypes: dict[Key, str] = field(default_factory=dict)
    trained: set[Key] = field(default_factory=set)

    _counts: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, name: str, value: Any, dtype: str = "") -> Key:
        key = kind, self._counts[kind]
        self._counts[kind] += 1
        self.values[key], self.names[key] = np.asarray(value), name
        self.dtypes[key] = dtype
        return key

    def add_variables(self, variables: Sequence[tuple[str, str, Any]]) -> None:
        for kind, name, variable in variables:
            key = self.add(kind, name, copied_value(variable))
            if kind == "variable" and variable.trainable:
                self.trained.add(key)

    def add_logs(self, logs: dict[str, Any]) -> None:
        ordered = sorted(logs.items(), key=lambda each: each[0] != "loss")
        for name, value in ordered:
            kind = "loss" if name.rpartition("_")[2] == "loss" else "metric"
            self.add(kind, name, np.asarray(value, "float64"))


class Training:
    """A model of the script in the scope of a strategy.

    Args:
        script: the script.
        strategy: a `Strategy`; the default one, or one device, for the comparison.
        initial: the values of variables; None for the model's own.
        keeps_optimizer: bool; False to record gradients in place of training.
        batches: the first batches, for an experiment; None to read the data.
    """

    def __init__(
        self,
        script: Script,
        strategy: Any,
        initial: Observed | None = None,
        keeps_optimizer: bool = True,
        batches: list[Batch] | None = None,
    ):
        self.script, self.strategy = script, strategy
        #: Steps that this training has taken.
        self.steps_taken = 0
        self._keeps_optimizer = keeps_optimizer
        keras.utils.set_random_seed(script.seed)
        with strategy.scope():
            self.model = script.build()
            if not isinstance(self.model, keras.Model):
                raise InvalidArgumentError(
                    "`build` of `verify` must return a `keras.Model`. It returned: "
                    f"{self.model!r}"
                )
            if script.step is None and not self.model.compiled:
                raise InvalidArgumentError(
                    "`build` of `verify` returned a model that is not compiled. Call "
                    "`model.compile(...)` in it, or pass a `step` of your own."
                )
            self.batches = batches or read_batches(
                fit_arguments(script.data), script.steps
            )
            self._built()
            if not keeps_optimizer:
                # Servers update rows in processes of their own; a rate that is a power
                # of two leaves the digits of gradients as they are.
                self.model.optimizer = (
                    keras.optimizers.SGD(_SERVER_RATE)
                    if script.on_servers
                    else GradientRecorder()
                )
            optimizer = getattr(self.model, "optimizer", None)
            if optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
        if initial is not None:
            self.restore(initial)

    def _built(self) -> None:
        batch = self.batches[0].parts
        if self.model.compiled and is_unbuilt(self.model):
            symbolic_build(self.model, batch)
        elif not self.model.built:
            self.model(keras.tree.map_structure(lambda leaf: leaf[:1], batch[0]))

    def variables(self) -> list[tuple[str, str, Any]]:
        """Kind, name and variable of all state, each once."""
        model, found = self.model, []
        for each in model.variables:
            kind = "random state" if is_seed_state(each) else "variable"
            found.append((kind, each.path, each))
        found += [("metric state", each.path, each) for each in model.metrics_variables]
        if getattr(model, "optimizer", None) is not None:
            found += [("slot", each.path, each) for each in model.optimizer.variables]
        return list({id(each[2]): each for each in found}.values())

    def state(self) -> Observed:
        """Copies of the values of all variables."""
        found = Observed()
        found.add_variables(self.variables())
        return found

    def restore(self, state: Observed) -> None:
        """Assigns weights and random numbers of another training's `state`."""
        counts: dict[str, int] = {}
        for kind, _, variable in self.variables():
            number = counts[kind] = counts.get(kind, -1) + 1
            value = state.values.get((kind, number))
            if kind not in ("variable", "random state") or value is None:
                continue
            if tuple(variable.shape) == value.shape:
                variable.assign(value)

    def fresh_seed(self) -> None:
        keras.utils.set_random_seed(self.script.seed)
        create_global_generator()

    def batches_again(self, most: int) -> list[Batch]:
        """The batches of the data, read once more and not repeated."""
        self.fresh_seed()
        with self.strategy.scope():
            return read_batches(fit_arguments(self.script.data), most, False)

    def train(
        self,
        steps: int,
        more: Sequence[Any] = (),
        records: dict[Position, Observed] | None = None,
    ) -> list[Observed]:
        """Takes steps as the script does.

        Args:
            steps: int.
            more: callbacks of `fit`; one of them may interrupt it.
            records: what was observed of `fit` before an interruption, by position;
                the steps that are taken now are added, or replace what is there.

        Returns:
            list of what is observed after each step.
        """
        self.fresh_seed()
        if self.script.step is not None:
            batches = self._distributed(self.batches[:steps])
            return [self._observed(self._own_step(batch)) for batch in batches]
        records = {} if records is None else records
        recorder = _Recorder(self, records, steps)
        with self.strategy.scope():
            given = fit_arguments(self.script.data)
        callbacks = [*(given.pop("callbacks", None) or []), recorder, *more]
        with contextlib.ExitStack() as stack:
            if more:
                stack.enter_context(contextlib.suppress(KeyboardInterrupt, Killed))
            elif self.script.is_resumed:
                # `Resume` shuffles arrays in an order of its own.
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                callbacks.append(Resume(folder))
            self.model.fit(**given, epochs=steps, verbose=0, callbacks=callbacks)
        return list(records.values())

    def _observed(self, logs: dict[str, Any]) -> Observed:
        self.steps_taken += 1
        found = Observed()
        found.add_logs(logs)
        found.add_variables(self.variables())
        return found

    def _distributed(self, batches: list[Batch]) -> Any:
        parts = [
            each.parts if len(each.parts) > 1 else each.parts[0] for each in batches
        ]
        dataset = self.strategy.experimental_distribute_dataset(parts)
        if dataset is parts:  # On one device.
            convert = keras.ops.convert_to_tensor
            return [keras.tree.map_structure(convert, each) for each in parts]
        return dataset

    def _own_step(self, batch: Any) -> dict[str, float]:
        assert self.script.step is not None
        with self.strategy.scope():
            logs = self.script.step(self.strategy, self.model, batch)
        if not isinstance(logs, dict):
            logs = {} if logs is None else {"loss": logs}
        return {
            name: float(keras.ops.convert_to_numpy(value))
            for name, value in logs.items()
        }

    # Experiments: one step, or one call, from a given state.

    def step(self, batch: Batch) -> Observed:
        """A step of which logs, gradients and values of variables are observed."""
        self.fresh_seed()
        self.steps_taken += 1
        trained = self.model.trainable_variables
        before = [copied_value(each) for each in trained]
        if self.script.step is not None:
            [distributed] = self._distributed([batch])
            logs = self._own_step(distributed)
        else:
            x, y, weights = (*batch.parts, None, None)[:3]
            logs = self.model.train_on_batch(
                x, y, sample_weight=weights, return_dict=True
            )
        found = Observed()
        found.add_logs(logs)
        recorder = self.model.optimizer
        if isinstance(recorder, GradientRecorder):
            pairs = zip(recorder.paths, recorder.gradients, strict=True)
            for path, gradient in pairs:
                found.add("gradient", path, copied_value(gradient))
        elif not self._keeps_optimizer:
            for variable, value in zip(trained, before, strict=True):
                moved = (value - copied_value(variable)) / _SERVER_RATE
                found.add("gradient", variable.path, moved)
                variable.assign(value)
        found.add_variables([v for v in self.variables() if v[0] == "variable"])
        return found

    def outputs(
        self, batch: Batch, training: bool = True
    ) -> tuple[Observed, list[Any]]:
        """The outputs of all layers, joined from all replicas, and their layers.

        The training is of no use afterwards.
        """
        self.fresh_seed()
        with self.strategy.scope():
            model, described = model_of_outputs(self.model, training)
            if self.script.step is None:
                model.compile()
        if self.script.step is None:
            tensors = model.predict_on_batch(batch.parts[0])
        else:
            tensors = self._outputs_in_run(model, batch)
        found = Observed()
        for (name, dtype, _), tensor in zip(described, tensors, strict=True):
            found.add("output", name, copied_value(tensor), dtype)
        return found, [layer for _, _, layer in described]

    def _outputs_in_run(self, model: Any, batch: Batch) -> Any:
        [inputs] = self._distributed([Batch(batch.parts[:1])])
        with self.strategy.scope():
            outputs = self.strategy.run(model, args=(inputs,))
            return [
                self.strategy.gather(each, axis=0)
                if isinstance(each, PerReplica)
                else each
                for each in outputs
            ]


class Killed(BaseException):
    """Ends `fit` as a kill of its process does: nothing of it is saved."""


class _Recorder(keras.callbacks.Callback):
    """Observes each step of `fit`, and ends it after the last."""

    def __init__(
        self, training: Training, records: dict[Position, Observed], steps: int
    ):
        super().__init__()
        self._training, self._records, self._steps = training, records, steps
        self._epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        model = self.model  # Keras on JAX writes the state into the variables here.
        self._records[self._epoch, batch] = self._training._observed(dict(logs or {}))
        if len(self._records) == self._steps:
            model.stop_training = True
