"""`Model.fit`, `evaluate` and `predict` on Torch."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import keras
import torch

from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device
from keras_strategies.engines.torch.confirmed_steps import (
    confirmed,
    written_by_steps,
)
from keras_strategies.engines.torch.cuda_batches import BatchPrefetcher, CudaMover
from keras_strategies.engines.torch.data_parallel.compiled_calls import (
    compiled_calls,
)
from keras_strategies.engines.torch.data_parallel.layer_call_driver import (
    TorchLayerCalls,
)
from keras_strategies.engines.torch.data_parallel.row_parts import on_host
from keras_strategies.engines.torch.devices import (
    device_of,
    memories,
    torch_device,
)
from keras_strategies.engines.torch.model_parallel.transposed_values import tensor_of
from keras_strategies.engines.torch.own_batches import OwnBatchPlacer
from keras_strategies.engines.torch.random_numbers.row_numbers import partitioned_step
from keras_strategies.engines.torch.replicas.replica_threads import ReplicaThreads
from keras_strategies.engines.torch.replicas.replica_variables import ReplicaVariables
from keras_strategies.engines.torch.rollback import TorchRollback
from keras_strategies.engines.torch.step_memory import step_peak
from keras_strategies.engines.torch.tensor_primitives import PRIMITIVES
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.keras_compat.models.building import compiled_variables
from keras_strategies.keras_compat.models.input_adapters import (
    batches_placed_by,
    own_part,
)
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.variables.loaded_variables import (
    give_first_value,
    is_waiting,
)
from keras_strategies.keras_compat.variables.values import (
    raw_value,
    set_raw_value,
    stored_dtype,
)
from keras_strategies.rows.row_tensors import error_text
from keras_strategies.runtime.data_parallel.data_parallel_call import DataParallelCall
from keras_strategies.runtime.data_parallel.row_parts import has_row_parts
from keras_strategies.runtime.drivers import FitDriver
from keras_strategies.runtime.placement import (
    Placement,
    StepCost,
    VariableCopy,
    mirrored_step_cost,
)
from keras_strategies.runtime.row_splits import check_batch
from keras_strategies.runtime.worker_batch import WorkerBatch
from keras_strategies.timeline import recording

if TYPE_CHECKING:
    from keras_strategies.engines.torch.model_parallel.packed_weights import (
        PackedWeights,
    )
    from keras_strategies.runtime.engine import StrategyCore


class TorchTrainer(FitDriver):
    """Trainer: steps on the device of the variables, layer calls on all replicas.

    Args:
        strategy: the strategy.
        shards: gathers the variables of which each worker has a shard; None without
            any.
    """

    # Replicas read weights only.
    mirrors_all = False

    def __init__(self, strategy: StrategyCore, shards: PackedWeights | None = None):
        super().__init__(strategy.placement)
        self._partitions_draws = strategy.partitions_draws
        self.threads = ReplicaThreads(self.placement.replicas)
        self.variables = ReplicaVariables(self.placement, shards)
        self._call = (
            None
            if self.placement.is_single
            else DataParallelCall(
                strategy,
                PRIMITIVES,
                TorchLayerCalls(strategy, self.threads, self.variables),
            )
        )
        workers = self.placement.workers
        self.rollback: TorchRollback | None = None
        if isinstance(workers, TorchCommunicator) and not workers.actions.is_fixed:
            self.rollback = TorchRollback(self._call, workers)
        home = torch_device(self.placement.variables)
        # With several replicas, each layer call moves their rows from the host.
        is_moved = self.placement.is_single and home.type == "cuda"
        whole = BatchPrefetcher(CudaMover(home) if is_moved else None)
        self.placer: BatchPrefetcher | OwnBatchPlacer = whole
        if workers is not None and self._call is not None:
            self.placer = OwnBatchPlacer(self.placement, self._call, whole)

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with (
            batches_placed_by(self.placer),
            keras.device(str(torch_device(self.placement.variables))),
        ):
            yield

    @contextlib.contextmanager
    def method(self, model: Any, name: str) -> Iterator[None]:
        if name != "compile" and not name.endswith("on_batch"):
            self.adopt(compiled_variables(model))
        yield
        if name == "compile":
            self.adopt(compiled_variables(model))

    def adopt(self, variables: Iterable[Any]) -> None:
        # Each is used with the model's, which are on this device.
        home = torch_device(self.placement.variables)
        for variable in variables:
            raw = raw_value(variable)
            if raw.device != home:
                moved = torch.nn.Parameter(raw.detach().to(home), raw.requires_grad)
                set_raw_value(variable, moved)

    def from_host(self, variable: Any, value: Any) -> Any:
        tensor = tensor_of(value)
        if tensor is None or not keras.backend.is_float_dtype(stored_dtype(variable)):
            # Keras converts it, or refuses to.
            return value
        if not is_waiting(variable):
            return tensor
        home = torch_device(self.placement.variables)
        # With the strides of the array, as Keras makes it.
        own = tensor.to(home, getattr(torch, stored_dtype(variable)), copy=True)
        give_first_value(variable, torch.nn.Parameter(own, variable.trainable))
        return None

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        # Of a step that is split, layer calls are compiled (`compiled_calls.py`).
        with uncompiled(model) if self._call else contextlib.nullcontext():
            function = keras_function(model, kind, make)
        step = self._repeated(model, kind, self._routed(model, kind, function))
        setattr(model, f"{kind}_function", step)

    def _repeated(
        self, model: Any, kind: str, step: Callable[..., Any]
    ) -> Callable[..., Any]:
        """A step that may be repeated with other workers."""
        workers, rollback = self.placement.workers, self.rollback
        if workers is None or rollback is None:
            return step
        owner, actions = weakref.ref(model), workers.actions

        def repeated(data: Any) -> Any:
            return actions.step(owner(), kind, lambda: rollback.take(step, data))

        return repeated

    def _routed(
        self, model: Any, kind: str, function: Callable[..., Any]
    ) -> Callable[..., Any]:
        workers = self.placement.workers
        call = self._call
        if self._partitions_draws and not (call is None and model.jit_compile):
            function = partitioned_step()(function)
        if call is None:
            return function
        if model.jit_compile:
            function = compiled_calls()(function)
        owner = weakref.ref(model)

        def step(data: Any) -> Any:
            check_steps(data, workers)
            if isinstance(self.placer, OwnBatchPlacer):
                data = list(map(self.placer.place, data))
            with confirmed(lambda: written_by_steps(owner()), workers):
                with layer_calls_through(call), self.variables.in_step():
                    found = function(data)
                if kind == "predict":
                    found = keras.tree.map_structure(on_host, found)
                if workers is not None:
                    # A step without collectives has not waited for them.
                    workers.steps.await_checks()
            return found

        return step

    def step_cost(self, model: Any, batch: Any) -> StepCost:
        cost = mirrored_step_cost(self.placement, model)
        return counted(cost, self.placement, model, batch, lambda v: v.shape)

    def memories(self, devices: tuple[Device, ...]) -> tuple[Device, ...]:
        return memories(devices)

    def copies(self, variable: Any) -> list[VariableCopy]:
        raw = raw_value(variable)
        nbytes = raw.numel() * raw.element_size()
        lead = self.placement.variables
        found = [VariableCopy(str(_named(raw, lead)), nbytes, "variable", raw)]
        found += [
            VariableCopy(str(device), nbytes, "variable", mirror)
            for device, mirror in self.variables.mirrors(variable)
        ]
        return found


def counted(
    cost: StepCost,
    placement: Placement,
    model: Any,
    batch: Any,
    own_shape: Callable[[Any], Sequence[int]],
    others: int = 0,
) -> StepCost:
    """The cost with the peak memory of a step, tracked on tensors without values.

    Args:
        cost: the cost without it.
        placement: the devices of replicas and variables.
        model: a compiled and built model with variables without values.
        batch: structure of `keras.KerasTensor`.
        own_shape: returns the shape of what a device keeps of a variable.
        others: int, bytes of what is not counted.
    """
    share = placement.replica_counts.total
    device = torch_device(placement.variables)
    try:
        peak = step_peak(model, batch, share, device, own_shape)
    except RuntimeError as error:
        # An operation without a result, where values are not known.
        reason = error_text(error)
        source = f"{cost.source}; the peak cannot be counted: {reason}"
        return replace(cost, source=source)
    source = f"{cost.source}; the peak is what Torch tracks without values"
    return replace(cost, peak=peak + others, source=source)


def _named(tensor: torch.Tensor, expected: Device) -> Device:
    """The device of a tensor; on a CPU the expected one, since torch has one CPU."""
    found = device_of(tensor)
    return expected if found.kind == expected.kind == "cpu" else found


def keras_function(
    model: Any, kind: str, make: Callable[[], Any]
) -> Callable[..., Any]:
    """Keras's own step function of a model, which `make` sets on it."""
    if model.steps_per_execution > 1:
        return several_steps(model, kind)
    make()
    function: Callable[..., Any] = getattr(model, f"{kind}_function")
    return function


@contextlib.contextmanager
def uncompiled(model: Any) -> Iterator[None]:
    """Context in which Keras makes steps that it does not compile."""
    is_compiled = model.jit_compile
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = is_compiled


def check_steps(data: Any, workers: Communicator | None) -> None:
    """Begins to compare the batches of the next steps with those of other workers."""
    if workers is not None:
        workers.steps.begin_steps(len(data))
    for batch in data:
        check_batch(own_part(batch))
        recording.count_rows(own_part(batch))
        if workers is None:
            continue
        if isinstance(batch, WorkerBatch):
            workers.steps.check_rows(sum(batch.every), batch.order)
        elif not has_row_parts(batch):
            # Own rows have been compared when they were read.
            workers.steps.check_batch(batch)


def several_steps(model: Any, kind: str) -> Callable[[list[Any]], Any]:
    """`steps_per_execution` steps on a list of batches.

    Keras 3.15 raises an error for more than one step on Torch. Here they are a loop;
    the only effect is that callbacks are called once for all of them.
    """
    one_step = getattr(model, f"{kind}_step")

    def steps(data: list[Any]) -> Any:
        with torch.set_grad_enabled(kind == "train"):
            outputs = [one_step(batch) for batch in data]
        if kind != "predict":
            return outputs[-1]
        return keras.tree.map_structure(lambda *parts: torch.cat(parts), *outputs)

    return steps
