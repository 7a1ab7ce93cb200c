"""Operations in a compiled layer call: collectives and draws of random numbers.

A program is the same for all replicas with a number of rows. These operations are
those of the replica that runs it: `Running` says which.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch

from keras_strategies.engines.torch.random_numbers.block_draws import (
    drawn_of_rows,
    has_factors,
    like_factors,
    seed_of,
)
from keras_strategies.engines.torch.random_numbers.rows_in_memory import (
    uninitialized_rows,
)
from keras_strategies.engines.torch.replicas.thread_collectives import (
    ThreadCollectives,
    gathered,
    gradients_of_own,
    reduced,
)
from keras_strategies.runtime.random_numbers.keras_draws import KerasDraw
from keras_strategies.runtime.random_numbers.row_draws import RowDraws
from keras_strategies.runtime.replicas.collectives import (
    MergeArguments,
    ReplicaCollectives,
)
from keras_strategies.types import ReduceOp


class NotCompiledError(Exception):
    """A call that is not compiled, with the reason as the end of a sentence."""


@dataclass(frozen=True)
class Running:
    """The replica whose program this thread runs.

    Args:
        collectives: those of its call.
        replica_id: int, its number on this worker.
        draws: callables, each of which makes the numbers of a draw.
    """

    collectives: ThreadCollectives
    replica_id: int
    draws: Sequence[Callable[[], torch.Tensor]] = ()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Context in which this thread runs it."""
        token = _running.set(self)
        try:
            yield
        finally:
            _running.reset(token)


_running: contextvars.ContextVar[Running] = contextvars.ContextVar("running")


def _replica() -> tuple[ThreadCollectives, int]:
    current = _running.get()
    return current.collectives, current.replica_id


# `after` is the result of the collective before, so that compilers keep their order. An
# argument is copied: its memory has other values when other threads still read it.


@torch.library.custom_op("keras_strategies::all_gather", mutates_args=())
def _all_gather(
    own: torch.Tensor, number: int, count: int, after: torch.Tensor | None = None
) -> torch.Tensor:
    [found], _ = gathered(*_replica(), ("call", number), 0, True, [own.clone()])
    return found


@_all_gather.register_fake
def _(own, number, count, after=None):  # type: ignore[no-untyped-def]
    return own.new_empty((own.shape[0] * count, *own.shape[1:]))


@torch.library.custom_op("keras_strategies::all_gather_gradient", mutates_args=())
def _all_gather_gradient(
    gradient: torch.Tensor, number: int, count: int, after: torch.Tensor | None = None
) -> torch.Tensor:
    key, lengths = ("backward", number), [gradient.shape[0] // count] * count
    [own] = gradients_of_own(*_replica(), key, 0, [lengths], [gradient.clone()])
    return own.clone(memory_format=torch.contiguous_format)


@_all_gather_gradient.register_fake
def _(gradient, number, count, after=None):  # type: ignore[no-untyped-def]
    return gradient.new_empty((gradient.shape[0] // count, *gradient.shape[1:]))


@torch.library.custom_op("keras_strategies::all_reduce", mutates_args=())
def _all_reduce(
    own: torch.Tensor,
    number: int,
    op: str,
    is_backward: bool,
    after: torch.Tensor | None = None,
) -> torch.Tensor:
    key = "backward" if is_backward else "call", number
    [found] = reduced(*_replica(), key, ReduceOp.parse(op), [own.clone()])
    return found.clone(memory_format=torch.contiguous_format)


@_all_reduce.register_fake
def _(own, number, op, is_backward, after=None):  # type: ignore[no-untyped-def]
    return own.new_empty(own.shape)


@torch.library.custom_op("keras_strategies::draw", mutates_args=())
def _draw(
    number: int,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    found = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return found.copy_(_running.get().draws[number]())


@_draw.register_fake
def _(number, shape, stride, dtype, device):  # type: ignore[no-untyped-def]
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.inputs = inputs[1:3]


_all_gather.register_autograd(
    lambda ctx, gradient: (
        _all_gather_gradient(gradient.contiguous(), *ctx.inputs),
        *(None, None, None),
    ),
    setup_context=_keep,
)
_all_reduce.register_autograd(
    lambda ctx, gradient: (
        _all_reduce(gradient.contiguous(), *ctx.inputs, True),
        *(None, None, None, None),
    ),
    setup_context=_keep,
)

_OPS = torch.ops.keras_strategies
_COLLECTIVES = (
    _OPS.all_gather.default,
    _OPS.all_gather_gradient.default,
    _OPS.all_reduce.default,
)


def prepare(graph: torch.fx.Graph) -> None:
    """Fixes the order of collectives in a graph.

    Raises:
        NotCompiledError: if the graph draws other random numbers than those of Keras.
    """
    before = None
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            raise NotCompiledError(f"it draws random numbers of torch ({node.target})")
        if node.target in _COLLECTIVES:
            if before is not None:
                node.update_kwarg("after", before)
            before = node


class CollectivesInProgram(ReplicaCollectives):
    """Collectives of a call that is traced: each is an operation of the program.

    Args:
        count: int, the replicas of all workers.
    """

    def __init__(self, count: int):
        self._count = count
        self._numbers = itertools.count(1)

    def all_reduce(
        self, replica: int, op: ReduceOp, tensors: Sequence[Any]
    ) -> Sequence[Any]:
        if op not in (ReduceOp.SUM, ReduceOp.MEAN):
            raise NotCompiledError(f"it calls `all_reduce` with {op.name}")
        return [
            _OPS.all_reduce(tensor, next(self._numbers), op.name, False)
            for tensor in tensors
        ]

    def all_gather(
        self, replica: int, tensors: Sequence[Any], axis: int, are_equal: bool = False
    ) -> Sequence[Any]:
        if axis or not are_equal:
            raise NotCompiledError("it calls `all_gather`")
        return [
            _OPS.all_gather(tensor, next(self._numbers), self._count)
            for tensor in tensors
        ]

    def merge_call(
        self, replica: int, merge: Callable[..., Any], arguments: MergeArguments
    ) -> Any:
        raise NotCompiledError("it calls `merge_call`")


class DrawsInProgram:
    """Draws of a call that is traced: each is an operation of the program.

    Their seeds are taken before the program, so that it may make them in any order.
    """

    def __init__(self) -> None:
        self._draws: list[KerasDraw] = []

    def __call__(self, draw: KerasDraw) -> torch.Tensor:
        is_dropout = has_factors(draw)
        values = {k: v for k, v in draw.given.items() if k != "inputs"}
        if any(isinstance(value, torch.Tensor) for value in values.values()) or (
            "inputs" in draw.given and not is_dropout
        ):
            raise NotCompiledError(f"it draws {draw.name!r} with tensors as parameters")
        number = len(self._draws)
        if not is_dropout:
            dtype = values.get("dtype") or keras.config.floatx()
            like = torch.empty(
                tuple(draw.shape), dtype=getattr(torch, dtype), device="meta"
            )
            self._draws.append(draw)
            return self._drawn(number, like, keras.ops.zeros(0).device)
        inputs = draw.given["inputs"]
        layout = inputs.shape, inputs.stride(), inputs.dtype, inputs.device
        self._draws.append(KerasDraw(draw.function, {**values, "inputs": layout}))
        like = uninitialized_rows(like_factors(draw), draw.shape[0])
        return inputs * self._drawn(number, like, inputs.device)

    def _drawn(
        self, number: int, like: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        found: torch.Tensor = _OPS.draw(
            number, like.shape, like.stride(), like.dtype, device
        )
        return found

    def seeded(self, draws: RowDraws) -> list[Callable[[], torch.Tensor]]:
        """Takes the seeds of a replica's draws: callables that make the numbers."""
        return [_seeded(draw, draws) for draw in self._draws]


def _seeded(draw: KerasDraw, draws: RowDraws) -> Callable[[], torch.Tensor]:
    layout = draw.given.get("inputs")
    if layout is not None:
        shape, stride, dtype, device = layout
        inputs = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        draw = KerasDraw(draw.function, {**draw.given, "inputs": inputs})
    rows = draws.next_draw(draw.length)
    return functools.partial(drawn_of_rows, draw, rows, seed_of(draw))
