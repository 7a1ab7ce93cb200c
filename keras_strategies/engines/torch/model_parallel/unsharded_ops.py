"""Operations without a correct sharding rule for DTensors.

Layer calls compute with ordinary tensors; code around them may compute with weights.
An operation without a sharding rule then runs on gathered tensors in every process:
exact, but slower. Random numbers are drawn for the full tensor in every process, from
generators in the same state, so they equal those of one device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from keras_strategies.engines.torch.compat import (
    TorchDispatchMode,
    dispatch_modes,
    local_shard,
    schema_arguments,
    shards_like,
    tree_flatten,
    tree_map,
)

_aten = torch.ops.aten
# Parts of Torch's error messages.
_NO_RULE = "Sharding propagation failed"
_NO_REDISTRIBUTION = "not supported yet"
# DTensor's own rule exchanges the edges of images between all processes, whatever the
# sharded axis.
_WRONG_RULE = frozenset([_aten.convolution.default, _aten.convolution_backward.default])


class UnshardedOps(TorchDispatchMode):
    """Dispatch mode that runs operations without a sharding rule on full tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._without_rule: set[Any] = set(_WRONG_RULE)

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
        mesh = _mesh((*args, *kwargs.values()))
        args = _mapped(lambda leaf: _promoted(leaf, mesh), args)
        even = _mapped(_even, args)
        kwargs = {
            key: _even(_promoted(value, mesh)) if _is_tensor(value) else value
            for key, value in kwargs.items()
        }
        result = self._run(func, even, kwargs)
        copies = _written_copies(func, args, even)
        for written, copy in copies:
            written.copy_(copy)
        # An operation on lists returns None.
        return copies[0][0] if copies and result is not None else result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _aten.view.default:
            args = (_contiguous(args[0]), *args[1:])
        if func is _aten.embedding.default:
            return _summed(func(*args, **kwargs))
        if func in self._without_rule or torch.Tag.nondeterministic_seeded in func.tags:
            return _on_full_tensors(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        except NotImplementedError:
            self._without_rule.add(func)
        except RuntimeError as error:
            # A rule that does not cover these placements.
            if _NO_RULE not in str(error) and _NO_REDISTRIBUTION not in str(error):
                raise
        return _on_full_tensors(func, args, kwargs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _mapped(function: Callable[[Any], Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of an operation, with a function of each tensor and list of them.

    `tree_map` takes a third of the time of an operation.
    """
    found = []
    for value in args:
        if isinstance(value, torch.Tensor):
            value = function(value)
        elif isinstance(value, (list, tuple)) and any(map(_is_tensor, value)):
            value = [function(each) if _is_tensor(each) else each for each in value]
        found.append(value)
    return tuple(found)


def _promoted(tensor: torch.Tensor, mesh: Any) -> DTensor:
    """A replicated DTensor of an ordinary tensor, in the same memory."""
    if isinstance(tensor, DTensor):
        return tensor
    return DTensor.from_local(tensor, mesh, run_check=False)


def _contiguous(value: Any) -> Any:
    """A tensor with a local part that can be viewed as any shape.

    Torch asks for a view where the strides of the full tensor allow one; those of the
    local part may not.
    """
    local = value.to_local()
    if local.is_contiguous():
        return value
    return DTensor.from_local(
        local.contiguous(),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _summed(value: Any) -> Any:
    """A lookup in a table by rows, summed over the processes that have the rows.

    The mask of such a partial sum serves one redistribution only, and the value may
    have several uses.
    """
    if not any(placement.is_partial() for placement in value.placements):
        return value
    placements = [Replicate() if p.is_partial() else p for p in value.placements]
    return value.redistribute(value.device_mesh, placements)


def _even(value: Any) -> Any:
    """The tensor, gathered along uneven axes: torch's views of those are wrong."""
    parts: dict[int, int] = {}
    for i, placement in enumerate(value.placements):
        if isinstance(placement, Shard):
            dim = placement.dim
            parts[dim] = parts.get(dim, 1) * value.device_mesh.size(i)
    uneven = [dim for dim, count in parts.items() if value.shape[dim] % count]
    if not uneven:
        return value
    placements = [
        Replicate() if isinstance(p, Shard) and p.dim in uneven else p
        for p in value.placements
    ]
    return value.redistribute(value.device_mesh, placements)


@functools.cache
def _written_arguments(func: Any) -> tuple[int, ...]:
    return tuple(
        i
        for i, argument in enumerate(schema_arguments(func))
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: Any) -> list[int]:
    """The indices of the arguments that an operation writes to."""
    return [i for i in _written_arguments(func) if i < len(args)]


def _written_copies(func: Any, args: Any, even: Any) -> list[tuple[Any, Any]]:
    """Pairs of an argument and the copy of it that an in-place operation wrote to."""
    pairs = []
    for i in _written(func, args):
        leaves = (tree_flatten(each)[0] for each in (args[i], even[i]))
        pairs += [pair for pair in zip(*leaves, strict=True) if pair[0] is not pair[1]]
    return pairs


def _mesh(args: Any) -> Any:
    """The mesh of the first DTensor among arguments."""
    for value in args:
        for leaf in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(leaf, DTensor):
                return leaf.device_mesh
    raise AssertionError("no DTensor among the arguments")


def _local(value: Any, mesh: Any, placements: Any) -> Any:
    """The local shard of a DTensor or of a replicated tensor."""
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor):
        replicated = [Replicate()] * mesh.ndim
        value = DTensor.from_local(value, mesh, replicated, run_check=False)
    if value.placements != tuple(placements):
        value = value.redistribute(mesh, placements)
    return value.to_local()


def _joined(value: Any, mesh: Any, placements: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return DTensor.from_local(value, mesh, placements, run_check=False)


def _on_full_tensors(func: Any, args: Any, kwargs: Any) -> Any:
    mesh = _mesh((*args, *kwargs.values()))
    placements = [Replicate()] * mesh.ndim
    locals_: Any = tree_map(lambda leaf: _local(leaf, mesh, placements), list(args))
    named = {key: _local(value, mesh, placements) for key, value in kwargs.items()}
    written = _written(func, args)
    for i in written:
        locals_[i] = locals_[i].clone()
    result = func(*locals_, **named)
    for i in written:
        if isinstance(args[i], DTensor):
            args[i].copy_(_joined(locals_[i], mesh, placements))
        else:
            args[i].copy_(locals_[i])
    if written:
        return args[written[0]]
    return tree_map(lambda leaf: _joined(leaf, mesh, placements), result)
