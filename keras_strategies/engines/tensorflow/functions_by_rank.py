"""Functions that TensorFlow traces separately for arguments of different ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


class FunctionsByRank:
    """A Python function as `tf.function`s, one for each combination of ranks.

    With `reduce_retracing`, a `tf.function` relaxes arguments that differ between its
    calls: their sizes, and also their rank. Neither rows can be split nor most layers
    be traced without a known rank.

    Args:
        function: the Python function.
        jit_compile: as for `tf.function`.
    """

    def __init__(self, function: Callable[..., Any], jit_compile: bool | None = None):
        self._function = function
        self._jit_compile = jit_compile
        self._by_ranks: dict[Any, Any] = {}

    def of(self, arguments: Any) -> Any:
        """The `tf.function` for a structure of arguments or `tf.TypeSpec`s."""
        ranks = tuple(_rank(leaf) for leaf in keras.tree.flatten(arguments))
        if ranks not in self._by_ranks:
            # TensorFlow warns of retracing by code object, which functions of several
            # models share; a partial function has none and is counted separately.
            own = functools.partial(self._function)
            self._by_ranks[ranks] = tf.function(
                own, reduce_retracing=True, jit_compile=self._jit_compile
            )
        return self._by_ranks[ranks]


def with_ranks_of(batch: Any, spec: Any) -> Any:
    """A specification of batches, with the ranks of one where they are unknown."""
    if not any(map(_is_of_any_rank, keras.tree.flatten(spec))):
        return spec

    def of_leaf(spec: Any, leaf: Any) -> Any:
        if not _is_of_any_rank(spec):
            return spec
        return tf.TensorSpec([None] * leaf.shape.rank, spec.dtype)

    return keras.tree.map_structure(of_leaf, spec, batch)


def _is_of_any_rank(spec: Any) -> bool:
    return isinstance(spec, tf.TensorSpec) and spec.shape.rank is None


def _rank(leaf: Any) -> int | None:
    """The rank of a tensor, array or specification; None if unknown, and for others."""
    shape = getattr(leaf, "shape", None)
    if isinstance(shape, tuple):
        return len(shape)
    return shape.rank if isinstance(shape, tf.TensorShape) else None
