"""Model parallelism: variables sharded over a mesh of devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_strategies.cluster import ClusterResolver
from keras_strategies.communication.communicator import Communicator
from keras_strategies.devices import Device, parse_device
from keras_strategies.engines import get_engine
from keras_strategies.errors import BackendError, InvalidArgumentError, LayoutError
from keras_strategies.layouts import (
    BATCH_AXIS,
    MIN_SHARD_BYTES,
    MODEL_AXIS,
    AutoLayouts,
    Axes,
    FullyShardedLayouts,
    LayoutRule,
    MappedLayouts,
    OneGroupLayouts,
    VariableMesh,
    mesh_shape,
)
from keras_strategies.runtime.call_options import check_implementation
from keras_strategies.runtime.engine import Engine, Feature, require
from keras_strategies.runtime.placement import Placement
from keras_strategies.strategies.base.strategy import Strategy
from keras_strategies.strategies.device_selection import (
    choose_devices,
    default_devices,
)
from keras_strategies.strategies.mirrored_processes import join_device_processes
from keras_strategies.strategies.multi_worker import find_workers
from keras_strategies.training.random_sync import sync_random_numbers
from keras_strategies.types import (
    CommunicationOptions,
    Elastic,
    check_count,
    check_flag,
)

_AXES = (BATCH_AXIS, MODEL_AXIS)


class ModelParallelStrategy(Strategy):
    """Synchronous training of models that do not fit on one device.

    The devices are a mesh, data x model. Batches are split along the data axis;
    variables, gradients and optimizer slots are sharded along the model axis, the data
    axis, or both. A step is one program for all devices, into which XLA inserts the
    collectives; it computes what one device computes. On Torch each device belongs to
    a process of its own, which a script starts by itself. There and on TensorFlow each
    device gathers variables and computes rows, so that all devices are replicas, and
    layouts of outputs have no effect.

    Args:
        layout_map: layouts of variables. `"auto"`: large embeddings, attention and
            feed-forward kernels along the model axis. `"fsdp"`: every large variable
            along the data axis, and gathered when it is used; with `model_parallel`
            above 1 along the model axis too. A `keras.distribution.LayoutMap`, or a
            dict from regular expressions of variable paths to tuples of axis names,
            such as `{".*ffn/kernel": (None, "model")}`; other variables are replicated.
            None is `"auto"`.
        devices: sequence of str or device objects, this process's, the model axis
            running fastest; None for those of the `LayoutMap`'s mesh, else for all
            local accelerators, or all CPU devices where there are none.
        model_parallel: int, devices along the model axis, which divides their number.
            None for the shape of the `LayoutMap`'s mesh; without one for 1 with
            `"fsdp"`, else for all devices.
        min_shard_bytes: int, bytes; `"auto"` and `"fsdp"` do not shard variables
            into smaller shards. None for 65,536. Refused with a layout map,
            which selects the sharded variables itself.
        cluster_resolver: `ks.cluster_resolver.ClusterResolver`, as for
            `MultiWorkerMirroredStrategy`: the mesh has the devices of all workers,
            worker by worker; None for the cluster of the environment (`TF_CONFIG` and
            others), or this process alone. `model_parallel` divides the devices of each
            worker, or takes all those of several. Only the shape and the axes of a
            `LayoutMap`'s mesh are used.
        communication_options: `CommunicationOptions`; `timeout_seconds` is the timeout
            between workers, 300 seconds by default.
        allow_unmatched: bool, whether patterns of a layout map may match no variable,
            as those of a map that serves several models. Otherwise such a pattern is
            an error in `plan`, `describe`, and the first `fit`, `evaluate` or
            `predict`.
        elastic: must be None: no other worker has the shards of a lost one.

    Raises:
        ValueError: for devices that do not exist or that `model_parallel` does not
            divide, for an invalid layout map, when a variable does not fit its layout,
            and, when a model is used, for patterns that match no variable.
        RuntimeError: on Torch with several devices in a process that is not a script.

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
        devices: Sequence[object] | None = None,
        model_parallel: int | None = None,
        *,
        min_shard_bytes: int | None = None,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        allow_unmatched: bool = False,
        elastic: Elastic | None = None,
    ):
        engine = get_engine()
        Elastic.check(elastic)
        if elastic is not None:
            raise InvalidArgumentError(
                "ModelParallelStrategy was given `elastic`. When a worker is lost, so "
                "are its shards of the variables, which no other worker has. Omit it, "
                "and use ks.callbacks.Resume to continue after a new start of all "
                "workers; with ks.MultiWorkerMirroredStrategy every worker has all "
                "variables."
            )
        require(engine, Feature.SHARDED_VARIABLES)
        layout_map = "auto" if layout_map is None else layout_map
        smallest = _smallest_shard(min_shard_bytes, layout_map)
        check_flag("allow_unmatched", allow_unmatched)
        if allow_unmatched and not isinstance(layout_map, Mapping):
            raise InvalidArgumentError(
                "`allow_unmatched` is for the patterns of a layout map, and "
                f"{layout_map!r} has none. Omit it."
            )
        # Before devices are listed: connecting engines adds those of other workers.
        resolver, workers, options = find_workers(
            engine, cluster_resolver, communication_options, devices
        )
        self._cluster_resolver = resolver
        given = getattr(layout_map, "device_mesh", None)
        own = _devices(engine, devices, None if workers is not None else given)
        if engine.has_python_per_device and workers is None:
            process = join_device_processes(
                engine, own, None, also_cpus=True, options=options
            )
            if process is not None:
                own, workers = (process.device,), process.workers
                self._cluster_resolver = process.resolver
        if engine.has_python_per_device:
            own = _one_device(engine, own)
        check_implementation(options, engine.name, own)
        every = [own] if workers is None else _of_all_workers(workers, own)
        found = tuple(device for each in every for device in each)
        shape, axes = _grid(layout_map, given, len(found), model_parallel)
        rule, outputs = _rule(layout_map, shape, smallest, allow_unmatched)
        index = 0 if workers is None else workers.group.index
        start = sum(len(each) for each in every[:index])
        if engine.has_python_per_device:
            # All processes compute rows: more axes than one would divide nothing.
            rule = OneGroupLayouts(VariableMesh(shape, axes, found, rule))
            shape, axes = (len(found),), axes[:1]
        mesh = VariableMesh(
            shape,
            axes,
            found,
            rule,
            outputs,
            None if workers is None else (start, start + len(own)),
        )
        width = 1 if engine.gathers_shards else len(found) // shape[0]
        replicas = own[::width]
        if workers is not None:
            workers = workers.with_replicas(lambda: len(replicas), _span(every, width))
        super().__init__(
            Placement(
                replicas,
                replicas[0],
                # Of variables that are not sharded.
                mirrored=engine.gathers_shards,
                workers=workers,
                mesh=mesh,
            )
        )
        if workers is not None:
            sync_random_numbers(engine, workers.group)

    @property
    def mesh(self) -> VariableMesh:
        """The mesh of devices and the layouts of variables."""
        mesh = self.placement.mesh
        assert mesh is not None
        return mesh

    def __repr__(self) -> str:
        grid = " x ".join(f"{n} {axis}" for axis, n in self.mesh.sizes.items())
        devices = ", ".join(str(device) for device in self.mesh.own_devices)
        text = f"<{type(self).__name__} {self.mesh.rule.name!r}, {grid}, on {devices}"
        if self.workers is not None:
            group = self.workers.group
            text += f", worker {group.index} of {group.count}"
        return f"{text}>"


def _of_all_workers(
    workers: Communicator, own: tuple[Device, ...]
) -> list[tuple[Device, ...]]:
    """The devices of each worker."""
    names = [str(device) for device in own]
    every = workers.group.gather_values("the devices of the mesh", names)
    return [tuple(parse_device(name) for name in each) for each in every]


def _span(every: Sequence[Sequence[Device]], width: int) -> int:
    """The number of workers that one replica spans."""
    counts = [len(each) for each in every]
    if all(count % width == 0 for count in counts):
        return 1
    if width % counts[0] == 0 and set(counts) == {counts[0]}:
        return width // counts[0]
    raise InvalidArgumentError(
        f"Each batch shard needs {width} devices, but the workers have {counts}. Use "
        "a `model_parallel` that divides the number of devices of each worker or, "
        "if all workers have equally many, is a multiple of it."
    )


def _grid(
    layout_map: Any, given: Any, count: int, model_parallel: int | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The shape and the axis names of the grid of `count` devices."""
    if given is None:
        if model_parallel is None:
            model_parallel = 1 if layout_map == "fsdp" else count
        return mesh_shape(count, model_parallel), _AXES
    shape = tuple(given.shape)
    if math.prod(shape) != count:
        raise InvalidArgumentError(
            f"The layout map's mesh has the shape {shape}, for {math.prod(shape)} "
            f"devices, but `devices` names {count} on all workers. Omit `devices` to "
            "use those of the mesh."
        )
    width = count // shape[0]
    if model_parallel is not None and model_parallel != width:
        raise InvalidArgumentError(
            f"`model_parallel` is {model_parallel}, but the layout map's mesh has "
            f"the shape {shape}, with {width} devices for each batch shard. Omit "
            "`model_parallel` to use the mesh's shape."
        )
    return shape, tuple(given.axis_names)


def _one_device(engine: Engine, devices: tuple[Device, ...]) -> tuple[Device, ...]:
    """The only device of this process in the mesh."""
    if len(devices) == 1:
        return devices
    raise BackendError(
        f"ks.ModelParallelStrategy was made with KERAS_BACKEND={engine.name!r}, where "
        f"each device of the mesh needs its own process. This one has {len(devices)}: "
        f"{', '.join(map(str, devices))}. A script starts the others by itself, which "
        "a notebook, a prompt or a test cannot: make a function `train`, in which each "
        f"process has one device, and call `ks.launch(train, workers={len(devices)})`, "
        f"or start a script with `keras-strategies launch --workers {len(devices)} "
        "--devices-per-worker 1 script.py` or torchrun. With KERAS_BACKEND=jax one "
        "process uses all devices."
    )


def _devices(
    engine: Engine, devices: Sequence[object] | None, given: Any
) -> tuple[Device, ...]:
    if devices is not None:
        return choose_devices(engine, devices)
    if given is not None and given.devices is not None:
        return choose_devices(engine, list(given.devices.flat))
    return default_devices(engine)


def _smallest_shard(given: int | None, layout_map: Any) -> int:
    """The bytes of the smallest shard."""
    if given is None:
        return MIN_SHARD_BYTES
    check_count("min_shard_bytes", given, 0, "a number of bytes,", ", or None")
    if isinstance(layout_map, Mapping):
        raise InvalidArgumentError(
            "`min_shard_bytes` is for the layouts 'auto' and 'fsdp'. A layout map "
            "selects the sharded variables itself; omit `min_shard_bytes`. "
            f"Received: min_shard_bytes={given}"
        )
    return given


def _rule(
    layout_map: Any,
    shape: tuple[int, ...],
    min_shard_bytes: int,
    allow_unmatched: bool,
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
            "`layout_map` must be 'auto', 'fsdp', a `keras.distribution.LayoutMap`, "
            "or a dict such as {'.*dense.*kernel': (None, 'model')}. Received: "
            f"{layout_map!r}"
        )
    layouts: dict[str, Axes] = {}
    for key in layout_map:
        layout = layout_map[key]
        axes = getattr(layout, "axes", layout)
        if not isinstance(axes, (tuple, list)):
            raise LayoutError(
                f"The layout of {key!r} must be a tuple with the name of a mesh axis "
                f"or None for each axis of the variable. Received: {layout!r}"
            )
        layouts[key] = tuple(axes)
    mapped = MappedLayouts(layouts, allow_unmatched)
    return mapped, mapped
