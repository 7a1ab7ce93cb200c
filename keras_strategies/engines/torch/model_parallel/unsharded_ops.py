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

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enters the mode; reentrant."""
        self._depth += 1
        try:
            if self._depth > 1:
                yield
            else:
                with self:
                    yield
        finally:
            self._depth -= 1

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
        if not _is_of_lists(func):
            return _run(func, args, kwargs)
        if _is_of_entries(func) and _are_alike(args):
            return _on_lists_of_shards(func, args, kwargs)
        # Each of a list has a layout of its own.
        found = [
            _run(func, [_item(value, i) for value in args], kwargs)
            for i in range(len(args[0]))
        ]
        return None if found[0] is None else [each for [each] in found]


def _item(values: Any, i: int) -> Any:
    return [values[i]] if isinstance(values, (list, tuple)) else values


def _are_alike(args: Sequence[Any]) -> bool:
    """Whether what lists have at one place are shards of one layout, or no shards."""
    first, *others = (each for each in args if isinstance(each, (list, tuple)))
    return all(
        _divided_along(one) == _divided_along(value)
        for values in others
        for one, value in zip(first, values, strict=True)
    )


def _divided_along(tensor: torch.Tensor) -> int | None:
    """The dimension along which processes have shards; None if they have all of it."""
    if not isinstance(tensor, DTensor):
        return None
    [placement] = spec_of(tensor).placements
    return placement.dim if placement.is_shard() else None


def _on_lists_of_shards(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Any] | None:
    """An operation of entries on lists, on what this process has of their tensors."""
    own = [
        list(map(_own, each)) if isinstance(each, (list, tuple)) else _own(each)
        for each in args
    ]
    results = func(*own, **kwargs)
    return None if results is None else list(map(_joined, results, args[0]))


def _own(value: Any) -> Any:
    """What this process has of a tensor; other values unchanged."""
    return local_shard(value) if isinstance(value, DTensor) else value


def _joined(own: Any, like: torch.Tensor) -> Any:
    """A tensor of which this process has `own`, with the layout of another one."""
    if not (_is_tensor(own) and isinstance(like, DTensor)):
        return own
    if own.dtype == like.dtype:
        return shards_like(own, like)
    return DTensor.from_local(
        *(own, like.device_mesh, like.placements),
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tensors = [t for t in tree_flatten([args, kwargs])[0] if _is_tensor(t)]
    mesh = next((t.device_mesh for t in tensors if isinstance(t, DTensor)), None)
    if mesh is None:
        return func(*args, **kwargs)  # Others of its list are in shards.
    like = next(filter(_is_divided, tensors), None)
    if like is None:
        return _on_full_tensors(func, args, kwargs, mesh)
    if func is _aten.sum.default:
        own = func(local_shard(like), **kwargs)
        dist.all_reduce(own, group=mesh.get_group())
        return _replicated(own, mesh)
    written = tree_flatten([args[i] for i in _written(func, args)])[0]
    is_alike = all(t.shape == like.shape or t.dim() == 0 for t in tensors)
    if _is_of_entries(func) and is_alike and all(map(_is_divided, written)):
        return _on_shards(func, args, kwargs, like)
    return _on_full_tensors(func, args, kwargs, mesh)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_divided(tensor: torch.Tensor) -> bool:
    """Whether processes have shards of a tensor, and not all of it."""
    return _divided_along(tensor) is not None


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
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], like: DTensor
) -> Any:
    """An operation of entries, on the shards of this process."""

    def own(value: Any) -> Any:
        if not _is_tensor(value) or value.dim() == 0:
            return _full(value)
        if isinstance(value, DTensor):
            return local_shard(value.redistribute(like.device_mesh, like.placements))
        number = like.device_mesh.get_local_rank()
        return layout_of(like).shard_of(value, number)

    result = func(*tree_map(own, list(args)), **tree_map(own, kwargs))
    if written := _written(func, args):
        return None if result is None else args[written[0]]
    return tree_map(lambda own: _joined(own, like), result)


def _on_full_tensors(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], mesh: Any
) -> Any:
    """An operation on gathered tensors, in every process."""
    full = tree_map(_full, list(args))
    written = _written(func, args)
    for i in written:
        full[i] = tree_map(torch.clone, full[i])
    result = func(*full, **tree_map(_full, kwargs))
    for i in written:
        pairs = zip(tree_flatten(args[i])[0], tree_flatten(full[i])[0], strict=True)
        for each, value in pairs:
            each.copy_(_replicated(value, mesh) if isinstance(each, DTensor) else value)
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
