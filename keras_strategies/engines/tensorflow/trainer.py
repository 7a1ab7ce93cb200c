"""`Model.fit`, `evaluate` and `predict` on TensorFlow."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_strategies.engines.tensorflow.activations import largest_activation
from keras_strategies.engines.tensorflow.compat.programs import default_strategy
from keras_strategies.engines.tensorflow.compat.variables import (
    is_resource_variable,
    new_variable,
)
from keras_strategies.engines.tensorflow.data_parallel.batch_passes import BatchPasses
from keras_strategies.engines.tensorflow.data_parallel.layer_call_driver import (
    TensorFlowLayerCalls,
)
from keras_strategies.engines.tensorflow.data_parallel.rollback import (
    TensorFlowRollback,
)
from keras_strategies.engines.tensorflow.data_parallel.step_function import StepFunction
from keras_strategies.engines.tensorflow.devices import device_of, tf_device
from keras_strategies.engines.tensorflow.epoch_datasets import EpochDatasets
from keras_strategies.engines.tensorflow.random_numbers.intercepted_draws import (
    intercept_draws,
)
from keras_strategies.engines.tensorflow.replicas.empty_replicas import pad_kernels
from keras_strategies.engines.tensorflow.replicas.lockstep_replicas import (
    ReplicaEngine,
    check_no_other_strategy,
)
from keras_strategies.engines.tensorflow.replicas.mirrored_variables import (
    MirroredVariable,
    mirror,
)
from keras_strategies.engines.tensorflow.replicas.plain_variables import (
    made_by_keras,
    warning_of_plain_variables,
)
from keras_strategies.engines.tensorflow.replicas.replica_run import (
    creating_variables,
)
from keras_strategies.engines.tensorflow.tensor_primitives import PRIMITIVES
from keras_strategies.engines.tensorflow.workers.worker_collectives import workers_of
from keras_strategies.keras_compat.backends.keras_on_tensorflow import (
    hook_tensorflow,
    is_in_optimizer,
)
from keras_strategies.keras_compat.models.building import build_optimizer, is_built
from keras_strategies.keras_compat.models.input_adapters import batches_placed_by
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.values import (
    declared_shape,
    raw_value,
    set_raw_value,
    stored_dtype,
)
from keras_strategies.runtime import context
from keras_strategies.runtime.colocation import colocation_reference
from keras_strategies.runtime.data_parallel.data_parallel_call import DataParallelCall
from keras_strategies.runtime.drivers import FitDriver
from keras_strategies.runtime.placement import (
    StepCost,
    VariableCopy,
    mirrored_step_cost,
)
from keras_strategies.runtime.state.run_state import is_local
from keras_strategies.runtime.worker_batch import WorkerRows

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TensorFlowTrainer(FitDriver):
    """Steps on the device of the variables; layers on all replicas."""

    # Replicas read weights only.
    mirrors_all = False
    # They are computed on one device (`StepFunction`).
    needs_few_rows = True

    def __init__(self, strategy: StrategyCore):
        super().__init__(strategy.placement)
        workers = workers_of(self.placement)
        if workers is not None:
            workers.use_device(tf_device(self.placement.variables))
        self.engine = ReplicaEngine(self.placement.replicas)
        self._others = [
            tf_device(device)
            for device in self.placement.replicas
            if device != self.placement.variables
        ]
        self._call: DataParallelCall | None = None
        self._passes = BatchPasses(self.placement)
        self.rollback: TensorFlowRollback | None = None
        if not self.placement.is_single:
            calls = TensorFlowLayerCalls(strategy, self.engine)
            self._call = DataParallelCall(strategy, PRIMITIVES, calls)
            if workers is not None and not workers.actions.is_fixed:
                changed = self._call.workers_changed
                self.rollback = TensorFlowRollback(changed, workers)
        home = self.placement.variables
        # Replicas take their rows from there, in the step.
        is_fixed = workers is not None and workers.actions.is_fixed
        self.placer = EpochDatasets(
            None if home.kind == "cpu" else tf_device(home),
            self.placement.replica_counts if is_fixed else None,
            None if workers is None or is_fixed else WorkerRows.by(self, workers),
        )

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        check_no_other_strategy()
        intercept_draws()
        pad_kernels()
        if self._call is not None:
            hook_tensorflow(
                _on_replica,
                _has_several_devices,
                _initialize,
                default_strategy,
                context.has_strategy,
            )
        with (
            batches_placed_by(self.placer),
            keras.device(str(self.placement.variables)),
            contextlib.nullcontext()
            if self.placement.is_single
            else warning_of_plain_variables(self.placement.replica_counts.total),
        ):
            yield

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        if self._call is None:
            make()
        else:
            step = StepFunction(model, kind, self._call, self._passes, self.rollback)
            setattr(model, f"{kind}_function", step)

    def plan_variables(self, variables: Sequence[Any]) -> None:
        def make(variable: Any, spec: Any) -> None:
            made = new_variable(spec, bool(variable.trainable), variable.name)
            set_raw_value(variable, made)

        for variable in variables:
            spec = tf.TensorSpec(declared_shape(variable), stored_dtype(variable))
            with creating_variables(tf_device(self.placement.variables)):
                self.initialize(variable, functools.partial(make, variable), spec)

    def step_cost(self, model: Any, batch: Any) -> StepCost:
        cost = mirrored_step_cost(self.placement, model)
        return self._with_activation(cost, model, batch)

    def _with_activation(self, cost: StepCost, model: Any, batch: Any) -> StepCost:
        """The cost with the largest activation of a replica."""
        x, *_ = keras.utils.unpack_x_y_sample_weight(batch)
        share = self.placement.replica_counts.total
        return replace(
            cost,
            activation=largest_activation(model, x, share),
            source=f"{cost.source}; TensorFlow knows no peak before a step has run",
        )

    def copies(self, variable: Any) -> list[VariableCopy]:
        raw = raw_value(variable)
        nbytes = raw.dtype.size * raw.shape.num_elements()
        places = [raw, *(raw.copies if isinstance(raw, MirroredVariable) else ())]
        return [
            VariableCopy(str(device_of(place)), nbytes, "variable", place)
            for place in places
        ]

    def initialize(
        self, variable: Any, original: Callable[[Any], None], value: Any
    ) -> None:
        """Creates the `tf.Variable` of a Keras variable, mirrored if replicas read it.

        Optimizer state is read on one device only, and on-read variables have a
        separate value on each replica; neither is mirrored. A `tf.Variable` passed by
        the user is not mirrored either: programs may assign it without its copies.
        """
        if (
            not self.placement.mirrored
            or not self._others
            or is_local(variable)
            or not _is_read_by_replicas()
            or isinstance(value, tf.Variable)
            or not (tf.executing_eagerly() or callable(value))
        ):
            original(value)
            return
        if tf.executing_eagerly():
            original(value)
        else:
            # A layer is built during a trace; its variables outlive the trace.
            with creating_variables(tf_device(self.placement.variables)):
                original(value)
        raw = raw_value(variable)
        if is_resource_variable(raw):
            mirror(raw, self._others, creating_variables)

    @contextlib.contextmanager
    def method(self, model: Any, name: str) -> Iterator[None]:
        # On TensorFlow, Keras builds an optimizer in the first step, but restoring a
        # backup builds it earlier: then this worker has variables that others lack.
        if self.placement.workers is not None and name != "compile" and is_built(model):
            build_optimizer(model)
        yield


def _is_read_by_replicas() -> bool:
    """Whether a new variable is mirrored, given its colocation or its creator."""
    reference = colocation_reference()
    if reference is not None:
        return isinstance(raw_value(reference), MirroredVariable)
    return not is_in_optimizer()


def _on_replica() -> bool:
    return context.current_replica() is not None


def _has_several_devices(model: Any) -> bool:
    strategy = strategy_of(model)
    return strategy is not None and not strategy.placement.is_single


def _initialize(variable: Any, original: Callable[[Any], None], value: Any) -> None:
    strategy = strategy_of(variable) or context.current_strategy()
    trainer = None if strategy is None else strategy.drivers.fit
    with made_by_keras():
        if isinstance(trainer, TensorFlowTrainer):
            trainer.initialize(variable, original, value)
        else:
            original(value)
