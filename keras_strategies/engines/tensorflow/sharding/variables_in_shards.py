"""Variables with a shard on each device of a mesh.

A sharded variable is a `tf.Variable` without a value of its own: its handle, by which
tapes and programs identify it, is empty. The value is in shards, each a `tf.Variable`
on a device, mirrored where several devices have the same shard. A read concatenates
the shards on the device that reads, and an assignment splits the new value, in eager
code and in programs. A gradient is that of the unsharded value.

An operation of `tf.raw_ops`, which takes a handle and not a variable, finds no value.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.gradients import (
    is_any_tape_active,
    with_gradient,
    without_recording,
)
from keras_strategies.engines.tensorflow.compat.graphs import graph_around_control_flow
from keras_strategies.engines.tensorflow.compat.variables import (
    VariableWithoutValue,
    new_variable,
    record_read,
    value_or_spec,
)
from keras_strategies.engines.tensorflow.replicas.captured_variables import (
    CapturedVariable,
)
from keras_strategies.engines.tensorflow.replicas.mirrored_variables import (
    MirroredVariable,
    mirror,
)
from keras_strategies.engines.tensorflow.replicas.replica_reads import (
    record_as_read_of,
    replica_device,
    unrecorded_on,
)
from keras_strategies.engines.tensorflow.sharding.shard_grid import ShardGrid
from keras_strategies.errors import ContextError

#: A context in which variables are created on a device.
Creating = Callable[[str], contextlib.AbstractContextManager[Any]]


class _Updating(threading.local):
    # The number of the shard that this thread reads and assigns in place of variables.
    shard: int | None = None


_updating = _Updating()


@contextlib.contextmanager
def on_shard(number: int) -> Iterator[None]:
    """Makes sharded variables stand for one of their shards in this thread."""
    previous = _updating.shard
    _updating.shard = number
    try:
        yield
    finally:
        _updating.shard = previous


class VariableInShards(CapturedVariable, VariableWithoutValue):
    """A variable in shards.

    Args:
        like: `tf.Variable` with the value, which is not referenced.
        grid: the shards, with the devices of this process.
        devices: dict from the number of a device of this process in the mesh to
            TensorFlow's name.
        creating: a context in which variables are created on a device.
        array: the value of a variable without one.
    """

    def __init__(
        self,
        like: tf.Variable,
        grid: ShardGrid,
        devices: Mapping[int, str],
        creating: Creating,
        array: np.ndarray | None = None,
    ):
        self.home = next(iter(devices.values()))
        with creating(self.home):
            super().__init__(like)
            value = value_or_spec(like) if array is None else array
            parts = grid.split(value, _split if array is None else np.split)
        self.grid = grid
        #: The shards of this process, by their numbers in the grid.
        self.shards: dict[int, tf.Variable] = {
            number: _made_shard(like, part, [devices[i] for i in holders], creating)
            for number, (part, holders) in enumerate(
                zip(parts, grid.holders, strict=True)
            )
            if holders
        }
        #: int, the number of assignments in eager code and in traces.
        self.version = 0
        # Graphs of programs, loops and branches with assignments.
        self._assigned_in: weakref.WeakSet[Any] = weakref.WeakSet()
        self._devices = dict(devices)
        self.value_assigned(None if isinstance(value, tf.TensorSpec) else value)

    @property
    def by_device(self) -> dict[str, tf.Variable]:
        """The shard on each device of this process, by TensorFlow's name."""
        return {
            name: _on(self.shards[number], name)
            for device, name in self._devices.items()
            for number, holders in enumerate(self.grid.holders)
            if device in holders
        }

    def value_assigned(self, value: Any) -> None:
        """Called with a new value, and with None when shards have new values."""

    # Reads.

    def value_on(self, device: str) -> Any:
        numbers = {name: number for number, name in self._devices.items()}
        reader = numbers.get(device, next(iter(self._devices)))
        parts = []
        for number, shard in self.shards.items():
            source = self._devices[self.grid.nearest(number, reader)]
            with tf.device(source):
                parts.append(_on(shard, source).read_value())
        with tf.device(device):
            return self.grid.join(parts, tf.concat)

    def gathered(self, device: str) -> Any:
        """The unsharded value on a device, without a gradient."""
        return self.value_on(device)

    def replica_value(self) -> Any:
        if _updating.shard is not None:
            return self._shard.read_value()
        record_read(self)
        device = replica_device()
        if device is not None or tf.executing_eagerly():
            with unrecorded_on(device or self.home):
                value = self.gathered(device or self.home)
            record_as_read_of(self, value, lambda gradient: gradient)
            return value
        with self._graph_of_read().as_default():
            with without_recording():
                value = self.gathered(self.home)
            # Gradients of inner programs follow operations.
            value, _ = with_gradient([value, self.handle], lambda g, _: [None, g])
        return value

    def _graph_of_read(self) -> tf.Graph:
        """That of a recorded read is around loops and branches.

        TensorFlow sums the gradients of a loop's reads from zeros of the shape that the
        handle's value has, and it has none.
        """
        graph = tf.compat.v1.get_default_graph()
        around = graph_around_control_flow()
        is_assigned = graph is not around and self._assigned_in.intersection(
            _graphs_between(graph, around)
        )
        if is_assigned or not (self.trainable and is_any_tape_active()):
            return graph
        return around

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        return tf.gather(self.read_value(), indices, name=name)

    def gather_nd(self, indices: Any, name: str | None = None) -> Any:
        return tf.gather_nd(self.read_value(), indices, name=name)

    @property
    def shape(self) -> Any:
        return super().shape if _updating.shard is None else self._shard.shape

    @property
    def _shard(self) -> tf.Variable:
        """The shard that stands for the variable."""
        assert _updating.shard is not None
        return self.shards[_updating.shard]

    # Assignments; those of slices and single entries are refused.

    def assign_array(self, value: Any) -> None:
        """Assigns an array of the same shape, one shard after the other."""
        self.value_assigned(value)
        self._note_assignment()
        with without_recording():
            for shard, part in self.own_parts(self.grid.split(value, np.split)):
                _at(shard, "assign")(
                    _copied(part, shard.device, self.dtype), read_value=False
                )

    def _assign_each(self, method: str, value: Any, read_value: bool) -> Any:
        value = tf.convert_to_tensor(value, dtype=self.dtype)
        self.value_assigned(value if method == "assign" else None)
        if not self.shape.is_compatible_with(value.shape):
            raise ValueError(
                f"Cannot assign value to variable {self.name!r}: shapes are different. "
                f"Expected: {self.shape}. Received: {value.shape}"
            )
        # A value of unknown shape is checked by the shards.
        if _updating.shard is not None:
            chosen = [(self._shard, value)]
        else:
            chosen = self.own_parts(self.parts_of(value))
            if method == "assign":
                chosen = [
                    (shard, _copied(part, shard.device, self.dtype))
                    for shard, part in chosen
                ]
        self._note_assignment()
        with without_recording():
            done = [
                _at(shard, method)(part, read_value=False) for shard, part in chosen
            ]
        return self._assigned(done, read_value)

    def _note_assignment(self) -> None:
        self.version += 1
        if not tf.executing_eagerly():
            self._assigned_in.add(tf.compat.v1.get_default_graph())

    def _assigned(self, operations: Sequence[Any], read_value: bool = True) -> Any:
        if read_value:
            # A read in a program waits for the assignment of each shard.
            return self
        return None if tf.executing_eagerly() else tf.group(*operations)

    def parts_of(self, value: Any) -> list[Any]:
        """The parts of a gradient, in the order of the shards.

        Args:
            value: tensor of the variable's shape, or `tf.IndexedSlices` of its rows.
        """
        if not isinstance(value, tf.IndexedSlices):
            return self.grid.split(value, _split)
        count, rows = self.grid.parts[0], self.shape[0] // self.grid.parts[0]
        found = []
        for i in range(count):
            own = value.indices - tf.cast(i * rows, value.indices.dtype)
            parts = value.values
            if count > 1:
                is_own = (own >= 0) & (own < rows)
                own, parts = tf.boolean_mask(own, is_own), parts[is_own]
            for part in self.grid.columns.split(parts, _split):
                shape = tf.constant([rows, *part.shape[1:]], tf.int32)
                found.append(tf.IndexedSlices(part, own, shape))
        return found

    def own_parts(self, parts: Sequence[Any]) -> list[tuple[tf.Variable, Any]]:
        """Pairs of a shard of this process and its part."""
        return [(shard, parts[number]) for number, shard in self.shards.items()]

    def _scatter(self, method: str, slices: tf.IndexedSlices) -> Any:
        if _updating.shard is not None:
            return _at(self._shard, method)(slices)
        self._note_assignment()
        with without_recording():
            chosen = self.own_parts(self.parts_of(slices))
            return self._assigned([_at(shard, method)(part) for shard, part in chosen])

    def _restore_from_tensors(self, restored_tensors: Any) -> Any:
        [value] = restored_tensors.values()
        return self.assign(value, read_value=False)


def _assign_method(name: str) -> Callable[..., Any]:
    def method(
        self: VariableInShards,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        return self._assign_each(method.__name__, value, read_value)

    method.__name__ = name
    return method


def _scatter_method(name: str) -> Callable[..., Any]:
    def method(
        self: VariableInShards,
        sparse_delta: Any,
        use_locking: bool = False,
        name: str | None = None,
    ) -> Any:
        return self._scatter(method.__name__, sparse_delta)

    method.__name__ = name
    return method


def _refused(self: VariableInShards, *args: Any, **kwargs: Any) -> Any:
    raise ContextError(
        f"Slices and entries of variable {self.name!r} cannot be assigned, since it is "
        "in shards. Assign a value of its shape, such as one of "
        "`tf.tensor_scatter_nd_update`."
    )


for _name in ("assign", "assign_add", "assign_sub"):
    setattr(VariableInShards, _name, _assign_method(_name))
for _name in ("add", "sub", "mul", "div", "min", "max", "update"):
    setattr(VariableInShards, f"scatter_{_name}", _scatter_method(f"scatter_{_name}"))
for _name in VariableInShards.entry_methods:
    setattr(VariableInShards, _name, _refused)


def _made_shard(
    like: tf.Variable, value: Any, devices: Sequence[str], creating: Creating
) -> tf.Variable:
    with creating(devices[0]):
        value = _copied(value, devices[0], like.dtype)
        shard = new_variable(value, False, f"{like.name.split(':')[0]}_shard")
    if len(devices) > 1:
        mirror(shard, devices[1:], creating)
    return shard


def tensor_of(array: np.ndarray) -> tf.Tensor:
    """The tensor of an array, which is transposed as a tensor if the array is.

    TensorFlow 2.21 copies transposed arrays by NumPy, which takes four times as long.
    """
    axes = np.argsort([-stride for stride in array.strides], kind="stable")
    if array.flags.c_contiguous or (axes == np.arange(array.ndim)).all():
        return tf.constant(array)
    return tf.transpose(tf.constant(array.transpose(axes)), np.argsort(axes))


def _copied(part: Any, device: str, dtype: tf.DType) -> Any:
    """A part of a tensor or an array in memory of its own, on a device.

    TensorFlow's parts of rows have the memory of all rows, which a variable would keep.
    """
    if isinstance(part, np.ndarray):
        with tf.device(device):
            return tensor_of(part.astype(dtype.as_numpy_dtype, copy=False))
    if isinstance(part, tf.TensorSpec) or not part.shape.rank:
        return part
    with tf.device(device):
        return tf.concat([part[:1], part[1:]], 0)


def _graphs_between(graph: Any, around: Any) -> Iterator[Any]:
    """A graph and those around it, without the outermost."""
    while graph is not around:
        yield graph
        graph = graph.outer_graph


def _on(shard: tf.Variable, device: str) -> tf.Variable:
    """The shard, or its copy on a device."""
    copy = shard.copy_on(device) if isinstance(shard, MirroredVariable) else None
    return shard if copy is None else copy


def _at(shard: tf.Variable, method: str) -> Callable[..., Any]:
    """A method of a shard, on its device."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with tf.device(shard.device):
            return getattr(shard, method)(*args, **kwargs)

    return call


def _split(value: Any, count: int, axis: int) -> Sequence[Any]:
    if isinstance(value, tf.TensorSpec):
        shape = value.shape.as_list()
        shape[axis] //= count
        return [tf.TensorSpec(shape, value.dtype)] * count
    return tf.split(value, count, axis)  # type: ignore[no-any-return]
