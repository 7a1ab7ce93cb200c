"""One call of a layer: its arguments, and the traits that determine its computation."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.rows.python_state import argument_key
from keras_strategies.rows.row_tensors import RowTensor, is_array, shape_of


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer.

    Args:
        layer: the `keras.layers.Layer`.
        call: its original `__call__`, with the layer bound.
        structure: the pair of arguments and keyword arguments.
        leaves: the leaves of the structure, arrays as tensors.
        rows: int, or a tensor in a program for any number of rows.
        adds: bool, whether it adds to its variables, whatever their values are, as a
            metric does. Those of replicas are zero before the call.
        only_adds: bool, whether that holds only for `assign_add` and `assign_sub`; then
            its variables may not be read.
        constants: frozenset of int, the numbers of leaves without gradient.
        exchanges: bool, whether replicas may exchange sums over rows. Losses and
            metrics get all rows of their arguments instead.
        is_in_run: bool, whether replicas call it in `run`. There what they assign to a
            variable has to be equal on them, unless it has an aggregation.
    """

    layer: Any
    call: Callable[..., Any]
    structure: Any
    leaves: list[Any]
    rows: Any
    adds: bool = False
    only_adds: bool = False
    constants: frozenset[int] = frozenset()
    exchanges: bool = True
    is_in_run: bool = False

    def arguments(self, leaves: Sequence[Any]) -> Any:
        """The pair of arguments and keyword arguments with other leaves."""
        args, kwargs = self.structure
        names = sorted(kwargs)
        given = (*args, *map(kwargs.__getitem__, names))
        if len(given) != len(leaves) or any(map(operator.is_not, given, self.leaves)):
            return keras.tree.pack_sequence_as(self.structure, leaves)
        # Arguments without containers: `keras.tree` takes 20 microseconds on Torch.
        named = dict(zip(names, leaves[len(args) :], strict=True))
        return tuple(leaves[: len(args)]), {name: named[name] for name in kwargs}


def leaf_key(leaf: Any, has_rows: bool) -> Any:
    """A hashable of an argument, without values of tensors and the number of rows."""
    if isinstance(leaf, RowTensor) or is_array(leaf):
        return has_rows, shape_of(leaf)[has_rows:], leaf.dtype
    return argument_key(leaf)


def argument_leaves(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The leaves of a call's arguments, in the order of `keras.tree`."""
    return leaves_of((args, kwargs))
