"""The interface of a framework's propagation of row placements."""

from __future__ import annotations

import abc
import enum
import gc
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_strategies.runtime.row_proofs.layer_calls import LayerCall
from keras_strategies.runtime.row_proofs.row_placements import RowProof

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


# The generations of garbage that are collected in turn for tensors that may be left.
# What the proof has made is young, where the trace around it collects nothing.
_COLLECTED = (0, 1, 2, 2, 2, 2, 2)
_SECONDS_BETWEEN = 0.02
# Besides plain values.
_OUTPUTS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, np.generic)


def is_plain_output(leaf: Any) -> bool:
    """Whether an output that is no tensor holds none either."""
    return isinstance(leaf, (*_OUTPUTS, np.ndarray, np.dtype, keras.Variable))


def problem_of_output(leaf: Any) -> str:
    """Why a call cannot be split that returns an object, as the end of a sentence."""
    return (
        f"one of its outputs is a {type(leaf).__name__}, which may hold tensors; "
        "return tuples, lists and dicts"
    )


class _Made(threading.local):
    """Weak references to tensors, or graphs of tensors, of a thread's last proof."""

    def __init__(self) -> None:
        self.objects: list[weakref.ref[Any]] = []


class RowProver(abc.ABC):
    """Propagates row placements through a layer call and its backward pass.

    No arithmetic of the call is done, and no result depends on values of tensors.

    Args:
        strategy: the strategy.
    """

    def __init__(self, strategy: StrategyCore):
        self.strategy = strategy
        self._made = _Made()

    def has_left_tensors(self) -> bool:
        """Whether a tensor of this thread's last `prove` is still alive.

        Nothing else than code of the user's has kept it then, after the changes of
        Python that are known were taken back.
        """
        for generation in _COLLECTED:
            if all(each() is None for each in self._made.objects):
                return False
            # Graphs and their operations refer to one another. It does nothing while
            # another thread collects.
            if not gc.collect(generation) and generation == 2:
                time.sleep(_SECONDS_BETWEEN)
        return any(each() is not None for each in self._made.objects)

    @abc.abstractmethod
    def prove(
        self, call: LayerCall, with_rows: Sequence[bool], sizes: Sequence[int]
    ) -> RowProof:
        """The placements of a call's results where each replica gets its rows.

        Calls the layer's Python, in a `StatelessScope` that drops what it assigns. A
        failure of the call itself (an error of the user's code) is a proof with a
        problem: the unsplit call that follows raises the error again.

        Args:
            call: the call, with tensors of the global batch.
            with_rows: for each leaf of the call, whether replicas get slices of its
                rows; others get it as it is.
            sizes: the numbers of rows of all replicas, in their order; empty in a
                program for any number of rows. Their sum is `call.rows`.
        """

    @abc.abstractmethod
    def draws(
        self, call: LayerCall, with_rows: Sequence[bool], sizes: Sequence[int]
    ) -> RowProof:
        """The draws of random numbers of a call that is known by type.

        Calls the layer's Python as `prove` does, without a propagation of placements.
        The result holds for any number of rows.

        Returns:
            A proof with `draws`, or with a `problem`.
        """

    @abc.abstractmethod
    def has_hooks(self, layer: Any) -> str:
        """Hooks of the framework that a call of a layer runs, as the begin of an error.

        Returns:
            str, such as "it has forward hooks of torch"; empty without hooks.
        """

    @abc.abstractmethod
    def surroundings(self) -> Any:
        """Hashable: the framework's state that changes what a call computes.

        Such as `torch.autocast`. Proofs hold for one value of it.
        """
