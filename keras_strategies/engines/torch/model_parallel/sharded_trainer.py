"""Model parallelism on Torch: variables as DTensors, one process for each device.

A layer call is the data-parallel call of several workers, each of which gathers the
weights that it computes with, whatever the axes of the mesh that they are sharded
along.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import torch
from torch.distributed.tensor import DTensor

from keras_strategies.engines.torch.devices import device_of, torch_device
from keras_strategies.engines.torch.model_parallel.packed_weights import (
    PackedWeights,
)
from keras_strategies.engines.torch.model_parallel.process_mesh import (
    ShardedDistribution,
    assign_shards,
    gather_shards,
    make_shards,
    start_default_group,
)
from keras_strategies.engines.torch.model_parallel.transposed_values import tensor_of
from keras_strategies.engines.torch.model_parallel.unsharded_ops import UnshardedOps
from keras_strategies.engines.torch.step_memory import read_dtype
from keras_strategies.engines.torch.trainer import TorchTrainer, counted
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.keras_compat.backends.keras_on_jax import set_layout
from keras_strategies.keras_compat.backends.keras_on_torch import (
    hook_torch_dtensors,
    track_parameters_again,
)
from keras_strategies.keras_compat.models.building import all_variables
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.variables.creation import (
    mix_in,
    set_variable_shape,
)
from keras_strategies.keras_compat.variables.dtensor_variables import DTensorVariable
from keras_strategies.keras_compat.variables.loaded_variables import (
    give_first_value,
    is_waiting,
)
from keras_strategies.keras_compat.variables.strategy_variables import (
    set_variable_strategy,
)
from keras_strategies.keras_compat.variables.values import (
    raw_value,
    set_raw_value,
    stored_dtype,
)
from keras_strategies.runtime.drivers import FitDriver, ShardingDriver
from keras_strategies.runtime.placement import (
    StepCost,
    VariableCopy,
    axes_of,
    check_layouts,
    nbytes_of,
)
from keras_strategies.runtime.state.chief_reads import ChiefReads

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


# On the chief, while it saves a model.
_reads: ChiefReads | None = None


def _read(value: Any) -> Any:
    """The value of a variable, or of its tensor, while the chief saves a model."""
    if _reads is None:
        return None
    return _reads.read(raw_value(value) if isinstance(value, keras.Variable) else value)


class ShardedTrainer(FitDriver, ShardingDriver):
    """Variables sharded over processes, each of which computes its rows."""

    def __init__(self, strategy: StrategyCore):
        super().__init__(strategy.placement)
        mesh, workers = self.placement.mesh, self.placement.workers
        assert mesh is not None
        assert workers is None or isinstance(workers, TorchCommunicator)
        self._mesh = mesh
        self._strategy = strategy
        self._device = torch_device(self.placement.variables)
        self._workers = start_default_group(workers)
        self._distribution = ShardedDistribution(mesh, self._device.type)
        self._unsharded_ops = UnshardedOps()
        shards = PackedWeights(self._workers, self._unsharded_ops.left)
        #: Steps and layer calls.
        self.by_rows = TorchTrainer(strategy, shards)

    @property
    def distribution(self) -> ShardedDistribution:
        return self._distribution

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        hook_torch_dtensors(gather_shards, _read, assign_shards)
        with (
            self.by_rows.scope(),
            self._distribution.scope(),
            self._unsharded_ops.entered(),
        ):
            yield

    @contextlib.contextmanager
    def method(self, model: Any, name: str) -> Iterator[None]:
        if self._device.type != "cpu":
            # The seed on the host is the same on all workers.
            state = torch.get_rng_state().numpy().tobytes()
            torch.get_device_module(self._device).manual_seed(zlib.crc32(state))
        with self.by_rows.method(model, name):
            self._shard_weights(model)
            yield
        # Models that are built from their first batch in `predict`.
        if name != "compile":
            check_layouts(self.placement, model)

    def _shard_weights(self, model: Any) -> None:
        """Shards layers that were made outside of every scope, or given weights later.

        Shards of all processes are those of the chief's values, as in the scope.
        """
        made = [
            variable
            for variable in (*model.trainable_variables, *model.non_trainable_variables)
            if strategy_of(variable) is None and raw_value(variable) is not None
        ]
        if not made:
            return
        self.adopt(made)
        for variable in made:
            set_variable_strategy(variable, self._strategy)
            self.initialized(variable)
        # Else they keep the full values, and `zero_grad` clears no others.
        track_parameters_again(model)

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        check_layouts(self.placement, model)
        self.by_rows.step_function(model, kind, make)

    def adopt(self, variables: Iterable[Any]) -> None:
        self.by_rows.adopt(variables)

    def unsharded(self, variables: Sequence[Any]) -> list[Any]:
        # Shards receive the chief's values when they are initialized.
        return [v for v in variables if not isinstance(raw_value(v), DTensor)]

    @contextlib.contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        global _reads
        workers = self.placement.workers
        if workers is None:
            yield
            return
        values = map(raw_value, all_variables(model))
        found = [raw for raw in values if isinstance(raw, DTensor)]
        reads = ChiefReads(workers.group, found, self._full_value)
        try:
            _reads = reads if workers.group.is_chief else None
            with reads.open():
                yield
        finally:
            _reads = None

    def _full_value(self, shards: DTensor) -> Any:
        """The full value of a DTensor, a NumPy array; a call of all processes."""
        with self.scope(), torch.no_grad():
            return keras.ops.convert_to_numpy(gather_shards(shards))

    def initialized(self, variable: Any) -> None:
        raw = raw_value(variable)
        # Keras 3.15 does so later, if the variable is made from a value.
        set_variable_shape(variable, tuple(raw.shape))
        on = self._distribution
        if isinstance(raw, DTensor):
            # Keras 3.16 has made a slot in the layout of its variable.
            layout = on.layout_of(raw)
        else:
            layout = on.variable_layout(variable)
        set_layout(variable, layout)
        dims = [i for i, axis in enumerate(layout.axes) if axis]
        if raw.is_meta or not dims or on.processes.size() == 1:
            return
        if not isinstance(raw, DTensor):
            shards = make_shards(raw.detach(), on.processes, dims[0], raw)
            set_raw_value(variable, torch.nn.Parameter(shards, raw.requires_grad))
        mix_in(variable, DTensorVariable)

    def from_host(self, variable: Any, value: Any) -> Any:
        raw, tensor = raw_value(variable), tensor_of(value)
        if tensor is None or not keras.backend.is_float_dtype(stored_dtype(variable)):
            # Keras converts it, or refuses to.
            return value
        if isinstance(raw, DTensor):
            assign_shards(raw, tensor, value)
            return None
        on = self._distribution
        dims = [i for i, axis in enumerate(on.variable_layout(variable).axes) if axis]
        if not is_waiting(variable) or not dims or on.processes.size() == 1:
            return tensor
        dtype = getattr(torch, stored_dtype(variable))
        like = torch.empty(0, dtype=dtype, device=self._device)
        shards = make_shards(tensor, on.processes, dims[0], like, value)
        give_first_value(variable, torch.nn.Parameter(shards, variable.trainable))
        return None

    def set_layouts(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            layout = self._distribution.own_layout(variable)
            set_layout(variable, layout)

    def step_cost(self, model: Any, batch: Any) -> StepCost:
        sent: dict[str, tuple[int, int]] = {}
        others = len(self._mesh.devices) - 1

        def add(kind: str, nbytes: int) -> None:
            if others:
                count, sum_ = sent.get(kind, (0, 0))
                sent[kind] = count + 1, sum_ + others * (nbytes // (others + 1))

        weights = self._packs(model.variables, are_sharded=True)
        # Both passes gather all, but the backward pass those that the forward pass has
        # read last.
        for pack in [*weights, *weights[:-2]]:
            nbytes = sum(
                math.prod(v.shape) * read_dtype(v, model.compute_dtype).itemsize
                for v in pack
            )
            add("all-gather of weights", nbytes)
        trained = list(reversed(model.trainable_variables))
        for pack in self._packs(trained, are_sharded=True):
            add("reduce-scatter of gradients", sum(map(nbytes_of, pack)))
        for pack in self._packs(trained, are_sharded=False):
            add("all-reduce of gradients", 2 * sum(map(nbytes_of, pack)))
        # At most two packs of weights, and two of gradients that are filled and sent.
        sizes = [sum(map(nbytes_of, pack)) for pack in weights]
        in_packs = 2 * min(len(sizes), 2) * max(sizes, default=0)
        cost = StepCost(None, sent, "estimated from the sizes of the variables")
        return counted(cost, self.placement, model, batch, self._own_shape, in_packs)

    def _packs(self, variables: Iterable[Any], *, are_sharded: bool) -> list[list[Any]]:
        """The packs of variables that are in shards or not, or of their gradients."""
        alike = [v for v in variables if any(axes_of(self._mesh, v)) == are_sharded]
        sizes = list(map(nbytes_of, alike))
        packs = self._workers.packs_of_sizes(sizes, are_sharded)
        return [[alike[i] for i in pack] for pack in packs]

    def _own_shape(self, variable: Any) -> Sequence[int]:
        axes = axes_of(self._mesh, variable)
        return self._mesh.shard_shape(tuple(variable.shape), axes)

    def copies(self, variable: Any) -> list[VariableCopy]:
        raw = raw_value(variable)
        is_sharded = isinstance(raw, DTensor)
        local = raw.to_local() if is_sharded else raw
        nbytes = local.numel() * local.element_size()
        device = device_of(local)
        if device.kind == "cpu":
            device = self.placement.variables
        role = "shard" if is_sharded else "variable"
        return [VariableCopy(str(device), nbytes, role, local)]
