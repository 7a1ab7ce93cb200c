"""Operations of code around layers on weights in shards.

Layer calls compute with ordinary tensors. Elsewhere an operation of entries, such as
those of an optimizer, the clipping of gradients or an average of weights, is computed
for the shards, a sum for the shards and then for the processes, and every other one for
the gathered tensors in every process: exact, but slower. Keras's optimizers call
operations on lists of tensors, each of which is one operation on lists of shards.
Random numbers are drawn for the full tensor in every process, from generators in the
same state, so they equal those of one device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from keras_strategies.engines.torch.compat import (
    TorchDispatchMode,
    dispatch_modes,
    local_shard,
    schema_arguments,
    shards_like,
    spec_of,
    tree_flatten,
    tree_map,
)
from keras_strategies.engines.torch.model_parallel.shards import layout_of

_aten = torch.ops.aten
#: Operations of entries that have no tag of Torch's.
_OF_ENTRIES = frozenset(
    [
        _aten._to_copy.default,
        _aten.alias.default,
        _aten.copy_.default,
        _aten.empty_like.default,
        _aten.fill_.Scalar,
        _aten.full_like.default,
        _aten.ones_like.default,
        _aten.zero_.default,
        _aten.zeros_like.default,
    ]
)


class UnshardedOps(TorchDispatchMode):
    """Dispatch mode that runs operations on shards, or on full tensors."""

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the mode; reentrant."""
        with contextlib.nullcontext() if self in dispatch_modes() else self:
            yield

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Leaves the mode around operations on ordinary tensors, to save its time."""
        modes = dispatch_modes()
        if not modes or modes[-1] is not self:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **kwargs)
        if func is _aten.detach.default:
            # Each gradient of shards is detached when it is kept.
            return shards_like(local_shard(args[0]).detach(), args[0])
        return _run(func, args, kwargs)


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    columns: list[Any] = [args]
    if _is_of_lists(func):
        columns = list(zip(*filter(_is_list, args), strict=True))
    is_written = bool(_written(func, args))
    if _is_of_entries(func) and all(_are_alike(each, is_written) for each in columns):
        return _on_shards(func, args, kwargs, columns)
    if len(columns) > 1:
        # Each of a list has a layout of its own.
        found = [
            _run(func, [[each[i]] if _is_list(each) else each for each in args], kwargs)
            for i in range(len(columns))
        ]
        return None if found[0] is None else [each for [each] in found]
    if func is _aten.sum.default and _is_divided(args[0]):
        own = func(local_shard(args[0]), **kwargs)
        dist.all_reduce(own, group=args[0].device_mesh.get_group())
        return _replicated(own, args[0].device_mesh)
    return _on_full_tensors(func, args, kwargs)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _divided_along(value: Any) -> int | None:
    """The dimension along which processes have shards; None if they have all of it."""
    if not isinstance(value, DTensor):
        return None
    [placement] = spec_of(value).placements
    return placement.dim if placement.is_shard() else None


def _is_divided(value: Any) -> bool:
    """Whether processes have shards of a tensor, and not all of it."""
    return _divided_along(value) is not None


def _are_alike(values: Sequence[Any], is_written: bool) -> bool:
    """Whether tensors, other than numbers, have one shape, and shards one layout.

    Args:
        values: the arguments, or those of lists at one place.
        is_written: bool, whether the first one is written to.
    """
    tensors = [value for value in values if _is_tensor(value) and value.dim()]
    if len(tensors) < 2:
        return True
    dims = list(map(_divided_along, tensors))
    divided = set(dims) - {None}
    return (
        len(divided) <= 1
        and not (divided and is_written and dims[0] is None)
        and all(value.shape == tensors[0].shape for value in tensors)
    )


def _mesh_of(args: Any) -> Any:
    """The mesh of the DTensors among arguments; None without any."""
    leaves = tree_flatten(args)[0]
    return next((t.device_mesh for t in leaves if isinstance(t, DTensor)), None)


@functools.cache
def _is_of_lists(func: Any) -> bool:
    return bool(func.name().startswith("aten::_foreach_"))


@functools.cache
def _is_of_entries(func: Any) -> bool:
    """Whether an operation computes each entry from those at its place."""
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if _is_of_lists(func):
        return "norm" not in func.name() and "max.default" not in func.name()
    return torch.Tag.pointwise in func.tags or func in _OF_ENTRIES


def _written(func: Any, args: Sequence[Any]) -> list[int]:
    """The indices of the arguments that an operation writes to."""
    return [i for i in _written_arguments(func) if i < len(args)]


@functools.cache
def _written_arguments(func: Any) -> tuple[int, ...]:
    return tuple(
        i
        for i, argument in enumerate(schema_arguments(func))
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _on_shards(
    func: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    columns: Sequence[Sequence[Any]],
) -> Any:
    """An operation of entries, on the shards that this process has or takes.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its other ones.
        columns: the arguments, or what lists of them have at each place.
    """
    likes = [next(filter(_is_divided, column), None) for column in columns]
    own = [
        list(map(_own, each, likes)) if _is_list(each) else _own(each, likes[0])
        for each in args
    ]
    results = func(*own, **tree_map(_local, kwargs))
    if written := _written(func, args):
        return None if results is None else args[written[0]]
    mesh = _mesh_of(args)
    if _is_of_lists(func):
        pairs = zip(results, likes, strict=True)
        return [_joined(result, like, mesh) for result, like in pairs]
    return tree_map(lambda result: _joined(result, likes[0], mesh), results)


def _local(value: Any) -> Any:
    """What this process has of a tensor; other values unchanged."""
    return local_shard(value) if isinstance(value, DTensor) else value


def _own(value: Any, like: DTensor | None) -> Any:
    """The shard of a tensor that this process has of another one; numbers unchanged."""
    if value is like or like is None or not _is_tensor(value) or not value.dim():
        return _local(value)
    if _is_divided(value):
        return local_shard(value)
    number = like.device_mesh.get_local_rank()
    return layout_of(like).shard_of(_local(value), number)


def _joined(own: Any, like: DTensor | None, mesh: Any) -> Any:
    """A tensor of which this process has `own`, with the layout of another one."""
    if like is None or not _is_tensor(own):
        return _replicated(own, mesh)
    if own.dtype == like.dtype:
        return shards_like(own, like)
    return DTensor.from_local(
        *(own, mesh, like.placements),
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _on_full_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operation on gathered tensors, in every process."""
    mesh = _mesh_of([args, kwargs])
    if mesh is None:
        return func(*args, **kwargs)  # Others of its list are in shards.
    full = tree_map(_full, list(args))
    written = _written(func, args)
    for i in written:
        full[i] = tree_map(torch.clone, full[i])
    result = func(*full, **tree_map(_full, kwargs))
    for i in written:
        pairs = zip(tree_flatten(args[i])[0], tree_flatten(full[i])[0], strict=True)
        for each, value in pairs:
            like = each if _is_divided(each) else None
            _local(each).copy_(_own(value, like))
    if written:
        return None if result is None else args[written[0]]
    return tree_map(lambda value: _replicated(value, mesh), result)


def _full(value: Any) -> Any:
    """The gathered tensor; other values unchanged."""
    if not isinstance(value, DTensor):
        return value
    if _is_divided(value):
        value = value.redistribute(value.device_mesh, [Replicate()])
    return local_shard(value)


def _replicated(value: Any, mesh: Any) -> Any:
    """A DTensor of which every process has all."""
    if not _is_tensor(value):
        return value
    return DTensor.from_local(value, mesh, [Replicate()], run_check=False)
