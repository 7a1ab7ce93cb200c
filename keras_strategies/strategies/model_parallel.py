"""Variables that are cut over a mesh of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_strategies.backends import get_backend
from keras_strategies.backends.base import Backend, Placement
from keras_strategies.devices import Device
from keras_strategies.errors import InvalidArgumentError, LayoutError
from keras_strategies.layouts import (
    BATCH_AXIS,
    MIN_SHARD_BYTES,
    MODEL_AXIS,
    AutoLayouts,
    Axes,
    FullyShardedLayouts,
    LayoutRule,
    MappedLayouts,
    VariableMesh,
    mesh_shape,
)
from keras_strategies.strategies.base import Strategy
from keras_strategies.strategies.devices import choose_devices, default_devices

_AXES = (BATCH_AXIS, MODEL_AXIS)


class ModelParallelStrategy(Strategy):
    """Synchronous training of models that one device is too small for.

    The devices are a grid, data x model. Batches are split along the data axis;
    variables, gradients and optimizer slots are cut along the model axis, the data
    axis, or both. A step is one program for all devices, into which XLA puts what
    they have to tell each other; it computes what one device computes.

    Args:
        layout_map: how variables are cut. `"auto"`: large embeddings, attention and
            feed-forward kernels along the model axis. `"fsdp"`: every large variable
            along the data axis, and gathered when it is used; with `model_parallel`
            above 1 along the model axis too. A `keras.distribution.LayoutMap`, or a
            dict from regular expressions of variable paths to tuples of axis names,
            such as `{".*ffn/kernel": (None, "model")}`; what they leave out is on
            every device. None is `"auto"`.
        devices: sequence of str, device names, the model axis running fastest; None
            for those of the `LayoutMap`'s mesh, else for all local accelerators, or
            all CPU devices where there are none.
        model_parallel: int, devices along the model axis, which divides their number.
            None for the shape of the `LayoutMap`'s mesh; without one for 1 with
            `"fsdp"`, else for all devices.
        min_shard_bytes: int, `"auto"` and `"fsdp"` leave variables whole whose parts
            would be smaller than this.

    Raises:
        ValueError: for devices that do not exist or that `model_parallel` does not
            divide, for a layout map that is none, and, when a variable is made, for
            one that its layout does not fit.
        RuntimeError: on backends that cannot cut variables.

    Example:

    >>> strategy = ks.ModelParallelStrategy("auto", model_parallel=4)
    >>> with strategy.scope():
    ...     model = make_transformer()
    ...     model.compile("adam", "sparse_categorical_crossentropy")
    >>> strategy.describe(model)
    >>> model.fit(x, y, batch_size=64)
    """

    def __init__(
        self,
        layout_map: keras.distribution.LayoutMap
        | Mapping[str, Axes]
        | str
        | None = None,
        devices: Sequence[str] | None = None,
        model_parallel: int | None = None,
        *,
        min_shard_bytes: int = MIN_SHARD_BYTES,
    ):
        backend = get_backend()
        backend.check_model_parallel()
        layout_map = "auto" if layout_map is None else layout_map
        mesh = _mesh(backend, layout_map, devices, model_parallel, min_shard_bytes)
        replicas = tuple(row[0] for row in mesh.rows)
        super().__init__(Placement(replicas, replicas[0], mirrored=False, mesh=mesh))

    @property
    def mesh(self) -> VariableMesh:
        """The grid of devices and how variables are cut over it."""
        mesh = self.placement.mesh
        assert mesh is not None
        return mesh

    def __repr__(self) -> str:
        grid = " x ".join(f"{n} {axis}" for axis, n in self.mesh.sizes.items())
        devices = ", ".join(str(device) for device in self.mesh.devices)
        return f"<{type(self).__name__} {self.mesh.rule.name!r}, {grid}, on {devices}>"


def _mesh(
    backend: Backend,
    layout_map: Any,
    devices: Sequence[str] | None,
    model_parallel: int | None,
    min_shard_bytes: int,
) -> VariableMesh:
    given = getattr(layout_map, "device_mesh", None)
    chosen = _devices(backend, devices, given)
    if given is not None:
        shape, axes = tuple(given.shape), tuple(given.axis_names)
        if math.prod(shape) != len(chosen):
            raise InvalidArgumentError(
                f"The layout map's mesh has the shape {shape}, for {math.prod(shape)} "
                f"devices, but `devices` names {len(chosen)}. Leave `devices` out to "
                "use the mesh's own."
            )
        width = len(chosen) // shape[0]
        if model_parallel is not None and model_parallel != width:
            raise InvalidArgumentError(
                f"`model_parallel` is {model_parallel}, but the layout map's mesh has "
                f"the shape {shape}, with {width} devices for each part of a batch. "
                "Leave `model_parallel` out to use the mesh's shape."
            )
    else:
        if model_parallel is None:
            model_parallel = 1 if layout_map == "fsdp" else len(chosen)
        shape, axes = mesh_shape(len(chosen), model_parallel), _AXES
    rule, outputs = _rule(layout_map, shape, min_shard_bytes)
    return VariableMesh(shape, axes, chosen, rule, outputs)


def _devices(
    backend: Backend, devices: Sequence[str] | None, given: Any
) -> tuple[Device, ...]:
    if devices is not None:
        return choose_devices(backend, devices)
    if given is not None and given.devices is not None:
        return choose_devices(backend, [str(name) for name in given.devices.flat])
    return default_devices(backend)


def _rule(
    layout_map: Any, shape: tuple[int, ...], min_shard_bytes: int
) -> tuple[LayoutRule, MappedLayouts | None]:
    if layout_map == "auto":
        return AutoLayouts(MODEL_AXIS, shape[1], min_shard_bytes), None
    if layout_map == "fsdp":
        model = AutoLayouts(MODEL_AXIS, shape[1], min_shard_bytes)
        inner = model if shape[1] > 1 else None
        rule = FullyShardedLayouts(BATCH_AXIS, shape[0], min_shard_bytes, inner)
        return rule, None
    if not isinstance(layout_map, Mapping):
        raise LayoutError(
            "`layout_map` is 'auto', 'fsdp', a `keras.distribution.LayoutMap`, or a "
            "dict such as {'.*dense.*kernel': (None, 'model')}. Received: "
            f"{layout_map!r}"
        )
    layouts: dict[str, Axes] = {}
    for key in layout_map:
        layout = layout_map[key]
        axes = getattr(layout, "axes", layout)
        if not isinstance(axes, (tuple, list)):
            raise LayoutError(
                f"The layout of {key!r} is a tuple with the name of a mesh axis or "
                f"None for each axis of the variable. Received: {layout!r}"
            )
        layouts[key] = tuple(axes)
    mapped = MappedLayouts(layouts)
    return mapped, mapped
