"""Model parallelism on Torch: variables as DTensors, one process for each device.

As with data parallelism, the outermost layer call is parallel. Every process has the
global batch and runs all of Keras's code. In the call, rows are split along the data
axis if they divide, variables have their layouts, and torch propagates both. Outputs
are gathered, so that losses, metrics and a custom `train_step` get the same values as
on one device.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import torch
from torch.distributed.tensor import DTensor

from keras_strategies.engines.torch.devices import device_of, torch_device
from keras_strategies.engines.torch.model_parallel.called_again import (
    called_again,
    entered_again_by,
)
from keras_strategies.engines.torch.model_parallel.gathered_weights import (
    GatheredWeights,
)
from keras_strategies.engines.torch.model_parallel.packed_weights import (
    PackedWeights,
)
from keras_strategies.engines.torch.model_parallel.process_mesh import (
    Placements,
    ShardedDistribution,
    assign_shards,
    gather_shards,
    make_shards,
    match_placements,
    start_default_group,
)
from keras_strategies.engines.torch.model_parallel.shard_updates import (
    updating_by_shards,
)
from keras_strategies.engines.torch.model_parallel.unsharded_ops import UnshardedOps
from keras_strategies.engines.torch.trainer import (
    TorchTrainer,
    check_steps,
    counted,
    keras_function,
)
from keras_strategies.engines.torch.worker_collectives import TorchWorkers
from keras_strategies.errors import BackendError, ContextError
from keras_strategies.keras_compat.backends.keras_on_jax import set_layout
from keras_strategies.keras_compat.backends.keras_on_torch import hook_torch_dtensors
from keras_strategies.keras_compat.models.building import all_variables, is_built
from keras_strategies.keras_compat.models.input_adapters import batches_placed_by
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import clear_losses, get_mask, set_mask
from keras_strategies.keras_compat.optimizers.optimizer_parts import optimizers_in
from keras_strategies.keras_compat.state_scope import StatePolicy, StateScope
from keras_strategies.keras_compat.thread_state import outside_stateless_scopes
from keras_strategies.keras_compat.variables.creation import (
    mix_in,
    set_variable_shape,
)
from keras_strategies.keras_compat.variables.dtensor_variables import DTensorVariable
from keras_strategies.keras_compat.variables.values import (
    autocast_dtype,
    raw_value,
    set_raw_value,
)
from keras_strategies.runtime.drivers import FitDriver, RunDriver, ShardingDriver
from keras_strategies.runtime.placement import (
    StepCost,
    VariableCopy,
    axes_of,
    check_layouts,
    itemsize,
    nbytes_of,
)

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


# Gathered values, by variable and by tensor, while a model is saved.
_gathered: dict[int, Any] = {}


def _read(value: Any) -> Any:
    return _gathered.get(id(value))


class _GatheredVariables(StatePolicy):
    """Gathered variables in a layer call; assignments take effect at once.

    Args:
        placements: of tensors on the mesh.
        weights: gathers those in shards.
    """

    def __init__(self, placements: Placements, weights: GatheredWeights):
        self._placements = placements
        self._weights = weights
        self._values: dict[int, Any] = {}

    def read(self, variable: Any) -> Any:
        raw = raw_value(variable)
        if isinstance(raw, DTensor):
            dtype = autocast_dtype(variable)
            placements = self._placements.gathered(raw)
            return self._weights.gather(
                raw, placements, None if dtype is None else getattr(torch, dtype)
            )
        value = self._values.get(id(variable))
        if value is None and raw is not None:
            value = self._values[id(variable)] = self._placements.used(raw)
        return value

    def assign(self, variable: Any, value: Any) -> None:
        self._values.pop(id(variable), None)
        with outside_stateless_scopes(), torch.no_grad():
            if not isinstance(raw_value(variable), DTensor):
                value = gather_shards(value)
            variable.assign(value)


class _FirstDerivatives(torch.autograd.Function):
    """Refuses gradients of gradients, which would be wrong.

    Redistributions along a model axis have no second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise BackendError(
                "A gradient that has gradients itself (`create_graph=True`) was asked "
                "for under ks.ModelParallelStrategy with a model axis. With "
                "KERAS_BACKEND='torch' its gradients would be wrong. Use "
                "`layout_map='fsdp'` with `model_parallel=1`, or KERAS_BACKEND=jax."
            )
        return gradient


class ShardedCall:
    """Calls a layer on the mesh."""

    def __init__(self, placements: Placements, distribution: ShardedDistribution):
        self._placements = placements
        self._distribution = distribution

    @torch.compiler.disable
    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        leaves = keras.tree.flatten((args, kwargs))
        with layer_calls_through(None):
            if any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                return call(*args, **kwargs)
            if not is_built(layer):
                return keras.tree.map_structure(gather_shards, call(*args, **kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
            by_rows = bool(tensors) and all(
                self._placements.splits(tensor) for tensor in tensors if tensor.ndim
            )
            args, kwargs = keras.tree.map_structure(
                lambda leaf: self._row_split(leaf, by_rows), (args, kwargs)
            )
            weights = GatheredWeights()
            with self._entered(weights, by_rows) as scope, weights.saved_as_shards():
                outputs = call(*args, **kwargs)
            clear_losses(layer)
            if scope.losses:
                # Functional models refuse `add_loss` on themselves.
                losses = [gather_shards(loss) for loss in scope.losses]
                keras.layers.Layer.add_loss(layer, losses)
            return keras.tree.map_structure(self._gathered, outputs)

    @contextlib.contextmanager
    def _entered(self, weights: GatheredWeights, by_rows: bool) -> Iterator[StateScope]:
        """Layers inside compute with gathered weights."""
        scope = _GatheredVariables(self._placements, weights).scope()

        def again() -> contextlib.AbstractContextManager[StateScope]:
            # What autograd saves then goes to the checkpoint's own hooks.
            return self._entered(GatheredWeights(), by_rows)

        with (
            entered_again_by(again),
            layer_calls_through(None),
            scope,
            self._sharding_outputs(by_rows),
        ):
            yield scope

    @contextlib.contextmanager
    def _sharding_outputs(self, by_rows: bool) -> Iterator[None]:
        axes = self._distribution.device_mesh.axis_names
        self._distribution.output_axes = axes if by_rows else axes[1:]
        try:
            yield
        finally:
            self._distribution.output_axes = ()

    def _row_split(self, leaf: Any, by_rows: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        spread = self._placements.spread(leaf, by_rows and leaf.ndim > 0)
        mask = get_mask(leaf)
        if mask is not None:
            set_mask(spread, self._placements.spread(mask, by_rows))
        return spread

    def _gathered(self, leaf: Any) -> Any:
        if not isinstance(leaf, DTensor):
            return leaf
        gathered = gather_shards(leaf)
        if self._placements.has_model_axis and gathered.requires_grad:
            gathered = _FirstDerivatives.apply(gathered)
        mask = get_mask(leaf)
        if mask is not None:
            set_mask(gathered, gather_shards(mask))
        return gathered


class ShardedTrainer(FitDriver, ShardingDriver):
    """Variables sharded over processes, batches split along the first mesh axis."""

    def __init__(self, strategy: StrategyCore):
        super().__init__(strategy.placement)
        mesh = self.placement.mesh
        assert mesh is not None
        self._mesh = mesh
        workers = self.placement.workers
        assert workers is None or isinstance(workers, TorchWorkers)
        self._device = torch_device(self.placement.variables)
        start_default_group(workers)
        self._distribution = ShardedDistribution(mesh, self._device.type)
        placements = Placements(self._distribution.processes)
        self._call = ShardedCall(placements, self._distribution)
        self._unsharded_ops = UnshardedOps()
        #: Training by rows; None where layers compute with shards of weights.
        self.by_rows: TorchTrainer | None = None
        if workers is not None and not placements.has_model_axis:
            shards = PackedWeights(workers, self._unsharded_ops.left)
            self.by_rows = TorchTrainer(strategy, shards)
        hook_torch_dtensors(
            gather_shards,
            match_placements,
            _read,
            self._distribution.place,
            assign_shards,
            called_again,
        )

    @property
    def distribution(self) -> ShardedDistribution:
        return self._distribution

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        with (
            batches_placed_by(self.by_rows.placer if self.by_rows else None),
            keras.device(str(self._device)),
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
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers_in(model):
                stack.enter_context(updating_by_shards(optimizer))
            stack.enter_context(super().method(model, name))
            yield
        # Models that are built from their first batch in `predict`.
        if name != "compile":
            check_layouts(self.placement, model)

    def step_function(self, model: Any, kind: str, make: Callable[[], Any]) -> None:
        check_layouts(self.placement, model)
        if self.by_rows is not None:
            self.by_rows.step_function(model, kind, make)
            return
        function = keras_function(model, kind, make)
        workers = self.placement.workers

        def step(data: Any) -> Any:
            check_steps(data, workers)
            with layer_calls_through(self._call):
                return function(data)

        setattr(model, f"{kind}_function", step)

    def unsharded(self, variables: Sequence[Any]) -> list[Any]:
        # Shards receive the chief's values when they are initialized.
        return [v for v in variables if not isinstance(raw_value(v), DTensor)]

    @contextlib.contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        workers = self.placement.workers
        try:
            with self.scope(), torch.no_grad():
                for variable in all_variables(model):
                    raw = raw_value(variable)
                    if isinstance(raw, DTensor):
                        found = keras.ops.convert_to_numpy(raw)
                        if workers is None or workers.group.is_chief:
                            _gathered[id(variable)] = _gathered[id(raw)] = found
            yield
        finally:
            _gathered.clear()

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
        placements = on.placements(layout)
        sizes = on.processes.shape
        pairs = zip(placements, sizes, strict=True)
        if raw.is_meta or not any(p.is_shard() and size > 1 for p, size in pairs):
            return
        if not isinstance(raw, DTensor):
            shards = make_shards(raw.detach(), on.processes, placements)
            set_raw_value(variable, torch.nn.Parameter(shards, raw.requires_grad))
        mix_in(variable, DTensorVariable)

    def set_layouts(self, variables: Sequence[Any]) -> None:
        for variable in variables:
            layout = self._distribution.own_layout(variable)
            set_layout(variable, layout)

    def step_cost(self, model: Any, batch: Any) -> StepCost:
        gathered = reduced = 0
        counts = [0, 0]
        parts = self._mesh.shape[0]
        # In packs, and without a model axis again for the backward pass.
        passes = 1 if self.by_rows is None else 2
        for variable in model.trainable_variables:
            axes = axes_of(self._mesh, variable)
            own = self._mesh.shard_shape(tuple(variable.shape), axes)
            nbytes = torch.Size(own).numel() * itemsize(variable.dtype)
            if self._mesh.is_split_over_batch(axes):
                counts[0] += 1
                gathered += (parts - 1) * nbytes
            elif parts > 1:
                counts[1] += 1
                reduced += 2 * (parts - 1) * nbytes // parts
        sent = {}
        if counts[0]:
            sent["all-gather of weights"] = (passes * counts[0], passes * gathered)
            sent["reduce-scatter of gradients"] = (counts[0], gathered)
        if counts[1]:
            sent["all-reduce of gradients"] = (counts[1], reduced)
        source = "estimated from the sizes of the variables"
        cost = StepCost(None, sent, source)
        if self.by_rows is None:
            return cost
        return counted(
            cost, self.placement, model, batch, self._own_shape, self._in_packs(model)
        )

    def _own_shape(self, variable: Any) -> Sequence[int]:
        axes = axes_of(self._mesh, variable)
        return self._mesh.shard_shape(tuple(variable.shape), axes)

    def _in_packs(self, model: Any) -> int:
        """Bytes of the weights and gradients that are gathered at one time."""
        workers = self.placement.workers
        assert isinstance(workers, TorchWorkers)
        sizes = [
            nbytes_of(variable)
            for variable in model.variables
            if tuple(self._own_shape(variable)) != tuple(variable.shape)
        ]
        packs = workers.packs_of_sizes(sizes)
        largest = max((sum(sizes[i] for i in pack) for pack in packs), default=0)
        # At most two packs of weights, and two of gradients that are filled and sent.
        return 2 * min(len(packs), 2) * largest

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


class ShardedRun(RunDriver):
    """Raises an error for `run`, which is not supported with sharded variables."""

    def __init__(self, strategy: StrategyCore):
        self._strategy = strategy

    def run(self, *args: Any) -> list[Any]:
        raise ContextError(
            f"`run` was called under {self._strategy!r}, which shards variables over "
            "processes. With KERAS_BACKEND='torch' it supports only `fit`, "
            "`evaluate`, `predict` and `*_on_batch`. Use `fit` with a custom "
            "`train_step`, or KERAS_BACKEND=jax."
        )

    def apply_gradients(self, *args: Any) -> None:
        """Not called without `run`."""

    def local_values(self, variable: Any) -> Sequence[Any]:
        return [raw_value(variable)]

    def variable_assigned(self, variable: Any) -> None:
        """Does nothing: the only replica uses the variable itself."""
