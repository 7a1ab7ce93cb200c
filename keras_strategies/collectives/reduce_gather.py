"""`Strategy.reduce` and `Strategy.gather`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from keras import ops

from keras_strategies.collectives import local_results
from keras_strategies.collectives.cross_device_ops import ReductionToOneDevice
from keras_strategies.errors import GatherError, InvalidArgumentError
from keras_strategies.runtime.call_options import call_options
from keras_strategies.runtime.state.replica_state import HALF
from keras_strategies.runtime.state.run_state import is_local
from keras_strategies.types import ReduceOp
from keras_strategies.values import (
    DistributedValues,
    Mirrored,
    map_structure,
)

if TYPE_CHECKING:
    from keras_strategies.communication.communicator import Communicator
    from keras_strategies.runtime.engine import StrategyCore

_ALONG_AXIS = {
    ReduceOp.SUM: ops.sum,
    ReduceOp.MEAN: ops.sum,
    ReduceOp.MIN: ops.min,
    ReduceOp.MAX: ops.max,
}


def reduce(
    strategy: StrategyCore, op: ReduceOp, value: Any, axis: int | Sequence[int] | None
) -> Any:
    """Reduces a structure over replicas, and along axes if any are given."""
    axes = None if axis is None else _axes(axis)
    return map_structure(lambda leaf: _reduce_leaf(strategy, op, leaf, axes), value)


def _axes(axis: Any) -> tuple[int, ...]:
    axes = tuple(axis) if isinstance(axis, (list, tuple)) else (axis,)
    if not axes or any(isinstance(a, bool) or not isinstance(a, int) for a in axes):
        raise InvalidArgumentError(
            "`axis` of `reduce` must be an int, a sequence of ints, or None to "
            f"reduce over replicas only. Received: axis={axis!r}"
        )
    return axes


def _reduce_leaf(
    strategy: StrategyCore, op: ReduceOp, leaf: Any, axes: tuple[int, ...] | None
) -> Any:
    if _is_shared(strategy, leaf) and axes is None:
        if op is ReduceOp.SUM:
            raise shared_value_error("reduce", leaf)
        return leaf
    tensors = components(strategy, leaf)
    dtype = keras.backend.standardize_dtype(tensors[0].dtype)
    if dtype in HALF and op in (ReduceOp.SUM, ReduceOp.MEAN):
        # As on one device: a mean in half precision is the sum of more than fits.
        wide = [_on_own_device(strategy, ops.cast, t, "float32") for t in tensors]
        return ops.cast(_reduce_tensors(strategy, op, wide, axes), dtype)
    return _reduce_tensors(strategy, op, tensors, axes)


def _is_shared(strategy: StrategyCore, leaf: Any) -> bool:
    """Whether a value is one object for several local replicas, or their copies."""
    if isinstance(leaf, keras.Variable):
        is_shared = not is_local(leaf)
    else:
        is_shared = isinstance(leaf, Mirrored) or not isinstance(
            leaf, DistributedValues
        )
    return is_shared and strategy.replicas_here > 1


def shared_value_error(method: str, value: Any) -> InvalidArgumentError:
    """The error for a sum of a value that is the same on all replicas."""
    return InvalidArgumentError(
        f"`{method}` with SUM received a value that is not a `PerReplica`: {value!r}. "
        "Its sum over replicas would be a multiple of it. Such values are results of "
        "`reduce` and `gather`, variables, and results of `run` that are one object on "
        "all replicas: Python numbers, arguments and captured tensors. Omit the call "
        "for a reduced value. Otherwise use 'MEAN', return a tensor that each replica "
        "makes, or multiply by `strategy.num_replicas_in_sync`."
    )


def _reduce_tensors(
    strategy: StrategyCore,
    op: ReduceOp,
    tensors: list[Any],
    axes: tuple[int, ...] | None,
) -> Any:
    if axes is None:
        return reduce_components(strategy, op, tensors)
    for tensor in tensors:
        axes = _axes_of(tensor, axes)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        # A replica without rows has no minimum and takes no part in one.
        present = [t for t in tensors if all(t.shape[axis] != 0 for axis in axes)]
        if strategy.other_workers is not None and not present:
            present = [_no_rows(op, tensors[0], axes)]
        tensors = present or tensors
    along = [
        _on_own_device(strategy, _ALONG_AXIS[op], tensor, axes) for tensor in tensors
    ]
    if op is not ReduceOp.MEAN:
        return reduce_components(strategy, op, along)
    total = reduce_components(strategy, ReduceOp.SUM, along)
    # The true denominator: the number of elements, not a mean of replicas' means.
    counts = [
        math.prod(ops.cast(ops.shape(tensor)[axis], total.dtype) for axis in axes)
        for tensor in tensors
    ]
    return total / reduce_components(strategy, ReduceOp.SUM, counts)


def _on_own_device(
    strategy: StrategyCore, function: Callable[..., Any], tensor: Any, *args: Any
) -> Any:
    """The result of a function of Keras on a replica's tensor, on its device."""
    with strategy.engine.on_device_of(tensor):
        return function(tensor, *args)


def _axes_of(tensor: Any, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a tensor, counted from 0."""
    rank = len(tensor.shape)
    found = tuple(axis % rank for axis in axes if -rank <= axis < rank)
    if len(found) == len(axes) == len(set(found)):
        return found
    given = axes[0] if len(axes) == 1 else axes
    raise GatherError(
        f"`reduce` received the axis {given}, but a replica's value has shape "
        f"{tuple(tensor.shape)}. Use `axis=None` to reduce over replicas only."
    )


def _no_rows(op: ReduceOp, tensor: Any, axes: tuple[int, ...]) -> Any:
    """A neutral row for minimum and maximum, for a worker without rows."""
    shape = list(tensor.shape)
    for axis in axes:
        shape[axis] = 1
    name = keras.backend.standardize_dtype(tensor.dtype)
    if keras.backend.is_float_dtype(name):
        extreme: float = float("inf")
        smallest = -extreme
    else:
        limits = np.iinfo(name)
        smallest, extreme = limits.min, limits.max
    return ops.full(shape, extreme if op is ReduceOp.MIN else smallest, dtype=name)


def gather(strategy: StrategyCore, value: Any, axis: int) -> Any:
    """Concatenates a structure over replicas along an axis."""
    return map_structure(lambda leaf: _gather_leaf(strategy, leaf, axis), value)


def _gather_leaf(strategy: StrategyCore, leaf: Any, axis: int) -> Any:
    tensors = components(strategy, leaf)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if any(len(shape) == 0 for shape in shapes):
        raise GatherError(
            "`gather` concatenates along an axis; a scalar has none. Found shapes "
            f"{shapes}. Use `reduce`, or `experimental_local_results`."
        )
    ranks = {len(shape) for shape in shapes}
    rank = len(shapes[0])
    if len(ranks) > 1 or not -rank <= axis < rank or not _alike(shapes, axis % rank):
        raise GatherError(
            f"`gather` along axis {axis} needs shapes that are equal but for that "
            f"axis. Found shapes {shapes}."
        )
    home = strategy.placement.variables
    own = ops.concatenate([strategy.engine.to_device(t, home) for t in tensors], axis)
    workers = strategy.other_workers
    if workers is None:
        return own
    return _gather_over_workers(workers, own, axis % rank)


def _gather_over_workers(workers: Communicator, own: Any, axis: int) -> Any:
    shapes = workers.group.gather_values("the shapes of `gather`", list(own.shape))
    if not _alike([tuple(shape) for shape in shapes], axis):
        raise GatherError(
            f"`gather` along axis {axis} needs shapes that are equal but for that "
            f"axis. The workers' values have the shapes {shapes}."
        )
    rows = [shape[axis] for shape in shapes]
    gathered = workers.gather_rows(ops.moveaxis(own, axis, 0), rows)
    workers.confirm()
    return ops.moveaxis(gathered, 0, axis)


def _alike(shapes: list[tuple[Any, ...]], axis: int) -> bool:
    rests = [shape[:axis] + shape[axis + 1 :] for shape in shapes]
    return all(
        a == b or None in (a, b)
        for rest in rests
        for a, b in zip(rest, rests[0], strict=True)
    )


def components(strategy: StrategyCore, leaf: Any) -> list[Any]:
    """A tensor for each replica; other values are the same on all replicas."""
    if isinstance(leaf, DistributedValues):
        values = list(leaf.values)
    elif isinstance(leaf, keras.Variable) and is_local(leaf):
        values = list(local_results.results(strategy, leaf))
    else:
        values = [leaf] * strategy.replicas_here
    return [
        _on_own_device(strategy, ops.convert_to_tensor, value)
        if ops.is_tensor(value)
        else ops.convert_to_tensor(value)
        for value in values
    ]


def _reduce_local(strategy: StrategyCore, op: ReduceOp, tensors: list[Any]) -> Any:
    """Reduces one tensor per local replica element by element."""
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        raise GatherError(
            "Replica values are reduced elementwise, so their shapes must be equal. "
            f"Found {sorted(shapes)}. Pass `axis=0` to reduce uneven batches along "
            "their rows too."
        )
    dtype = keras.backend.standardize_dtype(tensors[0].dtype)
    divides = op is ReduceOp.MEAN and not keras.backend.is_float_dtype(dtype)
    own = ReduceOp.SUM if divides else op
    home = strategy.placement.variables
    moved = [strategy.engine.to_device(tensor, home) for tensor in tensors]
    if own is ReduceOp.SUM and dtype == "bool":
        moved = [ops.cast(tensor, "int32") for tensor in moved]
    reduced = strategy.engine.all_reduce(own, moved)[0]
    return reduced / len(moved) if divides else reduced


def reduce_components(strategy: StrategyCore, op: ReduceOp, tensors: list[Any]) -> Any:
    """Reduces one tensor per local replica, and those of other workers."""
    workers = strategy.other_workers
    if workers is None:
        return _reduce_local(strategy, op, tensors)
    mean = op is ReduceOp.MEAN
    own = ReduceOp.SUM if mean else op
    [total] = workers.all_reduce(own, [_reduce_local(strategy, own, tensors)])
    workers.confirm()
    return total / strategy.num_replicas_in_sync if mean else total


def reduce_onto(
    strategy: StrategyCore,
    op: ReduceOp,
    pairs: Sequence[tuple[Any, Any]],
    options: Any,
) -> list[Any]:
    """Reduces values onto devices; see `StrategyExtended.batch_reduce_to`."""
    if op is ReduceOp.SUM:
        for value, _ in pairs:
            if _is_shared(strategy, value):
                raise shared_value_error("reduce_to", value)
    call_options(options, strategy.workers)
    ops_ = ReductionToOneDevice()
    workers = strategy.other_workers
    if workers is None:
        return ops_.batch_reduce(op, pairs)
    mean = op is ReduceOp.MEAN
    own = ReduceOp.SUM if mean else op
    onto = [(value, strategy.placement.variables) for value, _ in pairs]
    totals = workers.all_reduce(own, ops_.batch_reduce(own, onto))
    workers.confirm()
    if mean:
        totals = [total / strategy.num_replicas_in_sync for total in totals]
    return [
        ops_.broadcast(total, destinations)
        for total, (_, destinations) in zip(totals, pairs, strict=True)
    ]
