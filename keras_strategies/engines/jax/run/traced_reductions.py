"""Reductions over replicas, along an axis of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import keras
from jax import lax
from jax import numpy as jnp

from keras_strategies.errors import GatherError
from keras_strategies.types import ReduceOp


def check_axis(shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    """Raises `GatherError` for shapes that cannot be concatenated along an axis."""
    rank = len(shapes[0])
    rests = {s[: axis % max(rank, 1)] + s[axis % max(rank, 1) + 1 :] for s in shapes}
    if not -rank <= axis < rank or len(rests) > 1 or len({*map(len, shapes)}) > 1:
        raise GatherError(
            f"`all_gather` along axis {axis} needs shapes that are equal but for "
            f"that axis. Found shapes {[tuple(shape) for shape in shapes]}."
        )


_SHARDED = {
    ReduceOp.SUM: lax.psum,
    ReduceOp.MEAN: lax.pmean,
    ReduceOp.MIN: lax.pmin,
    ReduceOp.MAX: lax.pmax,
}


def all_reduce_over(op: ReduceOp, leaf: Any, axis: str) -> Any:
    """Reduces each replica's value along the replica axis of a mesh."""
    leaf = keras.ops.convert_to_tensor(leaf)
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return _rounded(_SHARDED[op](_widened(leaf), axis), leaf)
    return _without_gradient(op, lambda x: _SHARDED[op](x, axis))(leaf)


def sums_over(tensors: list[Any], axis: str) -> list[Any]:
    """Sums tensors along the replica axis, in one collective."""
    totals = lax.psum(list(map(_widened, tensors)), axis)
    return list(map(_rounded, totals, tensors))


_HALF = (jnp.float16, jnp.bfloat16)


def _widened(tensor: Any) -> Any:
    """The tensor in float32 if it is of half precision."""
    return tensor.astype("float32") if tensor.dtype in _HALF else tensor


def _rounded(total: Any, term: Any) -> Any:
    """A float32 sum or mean, rounded to half precision if its terms were."""
    return total.astype(term.dtype) if term.dtype in _HALF else total


def _without_gradient(
    op: ReduceOp, reduce: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """A reduction with a gradient that raises an error, as on the other backends.

    It is raised by the backward pass, which omits what `stop_gradient` has stopped: of
    the argument, or of the result.
    """
    function = jax.custom_vjp(reduce)

    def forward(value: Any) -> tuple[Any, None]:
        return reduce(value), None

    def backward(residuals: None, cotangent: Any) -> NoReturn:
        _refuse_gradient(op)

    function.defvjp(forward, backward)
    return function


def _refuse_gradient(op: ReduceOp) -> NoReturn:
    raise GatherError(
        f"`all_reduce` with {op.name} has no gradient. Use SUM or MEAN, or stop the "
        "gradient of its argument."
    )
