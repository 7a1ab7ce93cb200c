"""The steps of `fit`, `evaluate` and `predict` as TensorFlow programs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow.data_parallel.batch_passes import BatchPasses
from keras_strategies.engines.tensorflow.data_parallel.first_step import (
    optimizer_options,
)
from keras_strategies.engines.tensorflow.data_parallel.own_batches import (
    are_joined,
    in_parts,
    joined,
)
from keras_strategies.engines.tensorflow.data_parallel.row_parts import joined_silently
from keras_strategies.engines.tensorflow.data_parallel.step_traces import StepTraces
from keras_strategies.engines.tensorflow.epoch_datasets import EpochIterator
from keras_strategies.engines.tensorflow.functions_by_rank import (
    FunctionsByRank,
    with_ranks_of,
)
from keras_strategies.engines.tensorflow.workers.worker_collectives import workers_of
from keras_strategies.keras_compat.backends.keras_on_tensorflow import (
    step_is_traced_for_batches,
)
from keras_strategies.keras_compat.models.building import (
    build_optimizer,
    creates_metrics,
    is_built,
    symbolic_build,
)
from keras_strategies.keras_compat.models.input_adapters import RowsOfWorker, own_part
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.timeline import recording
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.communication.worker_steps import WorkerSteps
    from keras_strategies.engines.tensorflow.data_parallel.rollback import (
        TensorFlowRollback,
    )
    from keras_strategies.runtime.data_parallel.data_parallel_call import (
        DataParallelCall,
    )


class StepFunction:
    """`model.train_function`, `test_function` or `predict_function`.

    Keras reads batches from the iterator inside the program. Here they are read before
    it, because the number of rows determines the program:

    - as many rows as replicas, or more: layers are called on all replicas. The program
      is traced for the first batch's shape, and a second time for any number of rows
      when a batch of another size is read, both for each combination of ranks;
    - fewer rows, as in a last batch: Keras's step on one device, since a replica
      without rows would compute means of zero elements.

    Args:
        model: a compiled `keras.Model`.
        kind: str, `"train"`, `"test"` or `"predict"`.
        call: the data-parallel call of layers.
        passes: the passes over batches of the strategy.
        rollback: the rollback of steps; None in a fixed group.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        call: DataParallelCall,
        passes: BatchPasses,
        rollback: TensorFlowRollback | None,
    ):
        self._model = model
        self._kind = kind
        self._call = call
        self._passes = passes
        self._rollback = rollback
        self._optimizer_options = optimizer_options(call.placement)
        self._workers = workers_of(call.placement)
        self._steps = model.steps_per_execution
        if model.jit_compile:
            _warn_of_jit_compile(model)
        self._has_begun = False
        # Whether the step computes with all rows, which each worker has of arrays.
        # Programs show it, in a fixed group: a worker that joins has traced none.
        self._joins_rows = model.run_eagerly
        self._traces = StepTraces(model)
        self._make_programs()

    def _make_programs(self) -> None:
        """Creates the programs for the current workers; each is traced when called.

        `split` calls layers on all replicas, with rows of the global batch,
        `on_own_rows` with the rows that each worker has read, and `unsplit` is Keras's
        step on one device.
        """
        call, place = self._call, self._call.placement
        self._replicas = place.replica_counts.total
        self._group = None if self._workers is None else self._workers.group
        step = getattr(self._model, f"{self._kind}_step")

        def split(data: Any) -> Any:
            data = joined(data, place)
            with layer_calls_through(call):
                found = step(data)
                if self._kind == "predict":
                    return keras.tree.map_structure(joined_silently, found)
                return found

        def on_own_rows(data: Any) -> Any:
            batch = in_parts(data, place, call)
            found = split(batch)
            if self._rollback is None:
                self._joins_rows = self._joins_rows or are_joined(batch)
            return found

        def unsplit(data: Any) -> Any:
            return step(joined(data, place))

        self._split = self._program(split)
        self._on_own_rows = self._program(on_own_rows)
        self._unsplit = self._program(unsplit)
        self._traces.forget()

    def _program(self, step: Callable[[Any], Any]) -> Any:
        if self._model.run_eagerly:
            return step
        return FunctionsByRank(tf.autograph.experimental.do_not_convert(step))

    def __call__(self, batches: Iterable[Any]) -> Any:
        """Runs `steps_per_execution` steps.

        Args:
            batches: for `"predict"` a list of batches, else an iterator of them.

        Returns:
            The logs of the last step, or the outputs of all.
        """
        if isinstance(batches, EpochIterator):
            batches.epochs.reads_all = self._joins_rows
        spec = batches.element_spec if isinstance(batches, tf.data.Iterator) else None
        is_predict = self._kind == "predict"
        if self._workers is None:
            return self._run_steps(recording.reading(batches), spec)
        steps = self._workers.steps
        if isinstance(batches, tf.data.Iterator) and self._compares_ahead(steps):
            return self._run_prepared(self._passes.ahead(batches, spec, steps))
        if not is_predict:
            batches = steps.timed(batches)
        if self._rollback is None:
            return self._run_steps(batches, spec)
        read = list(batches if is_predict else itertools.islice(batches, self._steps))
        if not read:
            raise StopIteration
        return self._workers.actions.step(
            self._model, self._kind, lambda: self._run_repeatable_steps(read, spec)
        )

    def _compares_ahead(self, steps: WorkerSteps) -> bool:
        # A step of an elastic group compares its batch again if the group has changed.
        return steps.compares and self._rollback is None

    def _run_repeatable_steps(self, batches: list[Any], spec: Any) -> Any:
        assert self._rollback is not None
        self._rollback.begin_step()
        return to_numpy(self._run_steps(batches, spec))

    def _run_steps(self, batches: Iterable[Any], spec: Any) -> Any:
        passes = self._passes
        if self._kind == "predict":
            outputs = [self._one_step(*passes.prepared(batch)) for batch in batches]
            return keras.tree.map_structure(lambda *parts: _concat(parts), *outputs)
        return self._run_prepared(passes.prepared(batch, spec) for batch in batches)

    def _run_prepared(self, batches: Iterator[tuple[Any, Any]]) -> Any:
        logs = None
        for batch, spec in itertools.islice(batches, self._steps):
            logs = self._one_step(batch, spec)
        if logs is None:
            raise StopIteration
        return logs

    def _one_step(self, batch: Any, spec: Any) -> Any:
        recording.count_rows(own_part(batch))
        if self._workers is None:
            return self._step_on(batch, spec)
        self._workers.steps.begin_steps()
        self._workers.steps.await_checks()
        with self._workers.watched():
            return self._step_on(batch, spec)

    def _step_on(self, batch: Any, spec: Any) -> Any:
        if self._workers is not None and self._workers.group is not self._group:
            self._make_programs()
        if not self._has_begun:
            self._has_begun = True
            if not self._build(own_part(batch)):
                return self._call_uncached(self._unsplit, batch)
        if isinstance(batch, RowsOfWorker):
            return self._run(self._program_of_workers(batch), batch, spec)
        rows = _rows(batch)
        if rows is None or rows >= self._replicas:
            return self._run(self._split, batch, spec)
        return self._run(self._unsplit, batch, spec)

    def _program_of_workers(self, batch: RowsOfWorker) -> Any:
        on_own_rows = self._split if self._model.run_eagerly else self._on_own_rows
        if len(batch.every.shape) > 1:
            return on_own_rows
        every = np.asarray(batch.every)
        if every.all():
            return on_own_rows
        # A replica without rows would compute means of zero elements.
        if every.sum() >= self._replicas:
            return self._split
        return self._unsplit

    def _run(self, program: Any, batch: Any, spec: Any) -> Any:
        with self._optimizer_options():
            return self._run_on(program, batch, spec)

    def _run_on(self, program: Any, batch: Any, spec: Any) -> Any:
        if (
            spec is None
            or self._model.run_eagerly
            or _has_optionals(spec)
            # Workers whose rows differ would trace at different steps.
            or (self._workers is None and step_is_traced_for_batches(self._steps))
        ):
            return self._call_uncached(program, batch)
        own = with_ranks_of(batch, spec)
        concrete = self._traces.of(program, own, own_part(spec))
        if self._rollback is not None:
            self._rollback.begin_program(concrete)
        return concrete(batch)

    def _call_uncached(self, program: Any, batch: Any) -> Any:
        if self._rollback is not None:
            self._rollback.begin_program(None)
        if self._model.run_eagerly:
            return program(batch)
        return self._traces.call(program, batch)

    def _build(self, batch: Any) -> bool:
        """Builds the model, since replicas cannot create variables.

        Returns:
            Whether it is built. It is not if the shapes of a batch do not suffice,
            because the model calls its layers in its own way: then the first step
            runs on one device and builds it.
        """
        model = self._model
        traces_once = False
        if is_built(model):
            if not self._is_step_of_keras(batch):
                return True
            if not creates_metrics(model):
                build_optimizer(model)
                return True
            traces_once = True
        if self._kind == "predict":
            return False
        known = len(model.metrics_variables)
        try:
            symbolic_build(model, batch)
        except Exception:
            # If the model is wrong, the step that follows raises the error.
            return is_built(model)
        is_new = len(model.metrics_variables) > known
        self._traces.is_twice = traces_once and is_new
        return True

    def _is_step_of_keras(self, batch: Any) -> bool:
        """Whether Keras's own training step creates its variables when traced.

        `tf.function` traces a program twice if the first trace creates variables, such
        as those of metrics, and tracing is most of a first step: it is done only where
        layers draw numbers in Python. A custom step may train other variables or use
        other metrics.
        """
        model = self._model
        if self._kind != "train" or model.run_eagerly:
            return False
        if type(model).train_step is not keras.Model.train_step:
            return False
        dense = (tf.Tensor, np.ndarray)
        return all(isinstance(leaf, dense) for leaf in keras.tree.flatten(batch))


def _warn_of_jit_compile(model: Any) -> None:
    warn_user(
        f"Model {model.name!r} was compiled with `jit_compile=True`. On TensorFlow, "
        "XLA compiles programs for one device only, so a step on several replicas "
        "runs without XLA; results are the same but for random numbers, which XLA "
        "draws otherwise. Use ks.OneDeviceStrategy for XLA."
    )


def _has_optionals(spec: Any) -> bool:
    return any(isinstance(leaf, tf.OptionalSpec) for leaf in keras.tree.flatten(spec))


def _rows(batch: Any) -> int | None:
    """The rows of the first leaf with a batch axis; None where unknown."""
    for leaf in keras.tree.flatten(batch):
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape) > 0:
            return None if shape[0] is None else int(shape[0])
    return None


def to_numpy(outputs: Any) -> Any:
    """Outputs of a step as NumPy arrays, which workers can exchange."""
    return keras.tree.map_structure(
        lambda leaf: leaf.numpy() if isinstance(leaf, tf.Tensor) else leaf, outputs
    )


def _concat(parts: Any) -> Any:
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, parts)
    return tf.stack(parts) if len(parts[0].shape) == 0 else tf.concat(parts, 0)
