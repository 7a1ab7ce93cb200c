"""Model parallelism: a mesh of devices over which variables are cut."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np
from keras.distribution import DeviceMesh, LayoutMap, TensorLayout

from keras_strategies import context, keras_compat
from keras_strategies.engines.jax.devices import jax_device
from keras_strategies.engines.jax.fit import compiled_steps
from keras_strategies.engines.jax.fit.mesh_trainer import MeshTrainer
from keras_strategies.engines.jax.keras_distribution import splits
from keras_strategies.engines.jax.run.replica_program import JaxRun
from keras_strategies.engines.jax.sharding.cross_worker_shards import Parts, is_cut
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.errors import ContextError
from keras_strategies.layouts import VariableMesh
from keras_strategies.runtime.colocation import colocation_reference

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy


class ShardedDistribution(keras.distribution.ModelParallel):
    """Variables cut as a `VariableMesh` says, batches of any size.

    Args:
        mesh: the grid of devices and the layouts.
        devices: the devices of the grid, those of other workers too.
    """

    def __init__(self, mesh: VariableMesh, devices: Sequence[jax.Device]):
        # "cpu:1": JAX's own numbers, which Keras looks devices up by.
        names = [f"{d.platform}:{d.id}" for d in devices]
        grid = np.array(names).reshape(mesh.shape)
        device_mesh = DeviceMesh(mesh.shape, list(mesh.axes), grid)
        layout_map = LayoutMap(device_mesh)
        super().__init__(layout_map=layout_map, auto_shard_dataset=False)
        self._mesh = mesh
        self._layouts: dict[Any, TensorLayout] = {}
        # Whether the batch that is computed with has been split over the devices.
        self.splits_batch = True

    def get_data_layout(self, data_shape: Sequence[int]) -> TensorLayout:
        is_split = splits(data_shape, self._mesh.shape[0])
        return self._layout((self._mesh.batch_axis,) if is_split else ())

    def get_variable_layout(self, variable: Any) -> TensorLayout:
        own = getattr(variable, "_layout", None)
        if own is not None:
            return own
        reference = colocation_reference()
        if reference is None:
            return self.own_layout(variable)
        # On the same devices: sharded alike, where the shapes are the same.
        is_alike = tuple(reference.shape) == tuple(variable.shape)
        found = keras_compat.layout_of(reference) if is_alike else None
        return self._layout(()) if found is None else found

    def own_layout(self, variable: Any) -> TensorLayout:
        """How this strategy cuts a variable, whatever layout it has."""
        if variable is None:
            return self._layout(())
        itemsize = jax.numpy.dtype(variable.dtype).itemsize
        is_float = keras.backend.is_float_dtype(variable.dtype)
        axes = self._mesh.layout(variable.path, variable.shape, itemsize, is_float)
        return self._layout(axes)

    def get_tensor_layout(self, path: str) -> TensorLayout | None:
        if self._mesh.outputs is None:
            return None
        axes = self._mesh.outputs.find(path)
        if axes is None:
            return None
        if not self.splits_batch or context.current_replica() is not None:
            # Rows are all there already, or a replica's own.
            batch = self._mesh.batch_axis
            axes = tuple(None if axis == batch else axis for axis in axes)
        return self._layout(axes)

    def _layout(self, axes: tuple[str | None, ...]) -> TensorLayout:
        # One object for each, so that shardings are compared by identity.
        if axes not in self._layouts:
            self._layouts[axes] = TensorLayout(axes, self.device_mesh)
        return self._layouts[axes]


class ShardedTrainer(MeshTrainer):
    """Variables cut over a mesh, batches split along its first axis."""

    def __init__(self, strategy: Strategy):
        mesh = strategy.placement.mesh
        assert mesh is not None
        self._mesh = mesh
        workers = strategy.workers
        if workers is None:
            devices = [jax_device(device) for device in mesh.devices]
        else:
            assert isinstance(workers, JaxWorkers)
            devices = workers.devices_of(mesh.own_devices)
        distribution = ShardedDistribution(mesh, devices)
        super().__init__(strategy, distribution)  # type: ignore[arg-type]
        self.devices = devices[:: len(devices) // mesh.shape[0]]
        #: What reads variables that are cut over workers; None without any.
        self.parts = None if workers is None else Parts(workers)

    def share_variables(self, variables: Sequence[Any], all_of_them: bool) -> None:
        if not all_of_them:
            variables = [v for v in variables if v not in self._shared]
        whole: list[Any] = []
        cut: list[Any] = []
        for variable in variables:
            is_here = not is_cut(keras_compat.raw_value(variable))
            (whole if is_here else cut).append(variable)
        super().share_variables(whole, all_of_them)
        if cut:
            assert self.parts is not None
            self.parts.check(cut)
            for variable in cut:
                self._shared.add(variable)

    @contextlib.contextmanager
    def reading(self, model: Any) -> Iterator[None]:
        if self.parts is None:
            yield
            return
        keras_compat.sync_jax_state(model)
        with self.parts.reading(keras_compat.all_variables(model)):
            yield

    @contextlib.contextmanager
    def method(self, model: Any, name: str) -> Iterator[None]:
        with super().method(model, name):
            yield
        # Models that are built from their first batch in `predict`.
        if name != "compile":
            self.check_layouts(model)

    def step_function(
        self, model: Any, kind: str, make: Callable[[bool], Any], force: bool
    ) -> None:
        self.check_layouts(model)
        super().step_function(model, kind, make, force)

    def kept_layout(self, group: Sequence[jax.Array]) -> Any:
        return [array.sharding for array in group]

    def plain_step(self, model: Any, kind: str) -> compiled_steps.Step:
        return self._traced(super().plain_step(model, kind))

    def other_step(self, model: Any, kind: str) -> compiled_steps.Step | None:
        """The step in which what is cut along the data axis is gathered for use.

        Left to itself, XLA moves activations instead, which is less where a kernel is
        larger than the rows that it is used for, and more where it is not.
        """
        gathered = self._gathered_layouts(model)
        if not any(map(any, gathered)):
            return None
        step = super().plain_step(model, kind)

        def gathering_step(state: Any, batch: Any) -> tuple[Any, Any]:
            with _gathering(model, *gathered):
                return step(state, batch)

        return self._traced(gathering_step)

    def _traced(self, step: compiled_steps.Step) -> compiled_steps.Step:
        distribution = self.distribution()
        count = self._mesh.shape[0]

        def sharded_step(state: Any, batch: Any) -> tuple[Any, Any]:
            rows = [leaf.shape for leaf in jax.tree.leaves(batch)]
            distribution.splits_batch = all(splits(shape, count) for shape in rows)
            return step(state, batch)

        return sharded_step

    def _gathered_layouts(self, model: Any) -> tuple[list[Any], list[Any]]:
        """How trainable variables and others are gathered; None for those that stay."""
        groups = (model.trainable_variables, model.non_trainable_variables)
        trainable, fixed = ([self._gathered_layout(v) for v in vs] for vs in groups)
        return trainable, fixed

    def _gathered_layout(self, variable: Any) -> _Gathered | None:
        """A variable's layout and the one without the data axis, if they differ."""
        own = self.sharding_of(variable)
        batch = self._mesh.batch_axis
        if batch not in own.spec:
            return None
        spec = jax.P(*(None if axis == batch else axis for axis in own.spec))
        return _Gathered(own, jax.NamedSharding(own.mesh, spec))

    def run_replicas(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        workers = self.strategy.workers
        if workers is not None and workers.is_spanned:
            raise ContextError(
                f"`run` was called under {self.strategy!r}, each of whose replicas "
                "takes the devices of several workers, while a replica function runs "
                "on one. Use `fit` with a `train_step` of your own, or a "
                "`model_parallel` that divides the devices of a worker."
            )
        return super().run_replicas(fn, args, kwargs)

    @functools.cached_property
    def run(self) -> JaxRun:
        mesh = self.distribution().device_mesh.backend_mesh
        return JaxRun(self.strategy, self.devices, mesh, self.sharding_of)

    def sharding_of(self, variable: Any) -> jax.NamedSharding:
        """The sharding that a variable's values have."""
        layout = keras_compat.layout_of(variable)
        if layout is None:
            return self.whole
        sharding: jax.NamedSharding = layout.backend_layout
        return sharding


@dataclass(frozen=True)
class _Gathered:
    """How a variable is kept, and how it is used."""

    kept: jax.NamedSharding
    used: jax.NamedSharding


@contextlib.contextmanager
def _gathering(
    model: Any,
    layouts: Sequence[_Gathered | None],
    fixed: Sequence[_Gathered | None],
) -> Iterator[None]:
    """Has the layers of a model called with variables that are whole on the data axis,
    where they are cut along it.
    """
    original = model.stateless_call

    def stateless_call(
        trainable_variables: Sequence[Any],
        non_trainable_variables: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(
            _gathered(trainable_variables, layouts),
            _gathered(non_trainable_variables, fixed),
            *args,
            **kwargs,
        )

    # Past Keras's tracking of attributes.
    object.__setattr__(model, "stateless_call", stateless_call)
    try:
        yield
    finally:
        object.__delattr__(model, "stateless_call")


def _gathered(values: Sequence[Any], layouts: Sequence[_Gathered | None]) -> list[Any]:
    return [
        value if layout is None else _gather(layout, value)
        for value, layout in zip(values, layouts, strict=True)
    ]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(layout: _Gathered, value: Any) -> Any:
    """A value that was cut, whole. Its gradient is cut again, so that it is reduced
    and scattered at once, and slots are updated where they are.
    """
    return jax.lax.with_sharding_constraint(value, layout.used)


def _gather_forward(layout: _Gathered, value: Any) -> tuple[Any, None]:
    return _gather(layout, value), None


def _gather_backward(layout: _Gathered, _: None, gradient: Any) -> tuple[Any]:
    return (jax.lax.with_sharding_constraint(gradient, layout.kept),)


_gather.defvjp(_gather_forward, _gather_backward)
