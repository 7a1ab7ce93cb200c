"""State of a replica in a layer call: its variables' values, outputs and updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.models.layers import get_mask
from keras_strategies.keras_compat.recorded_calls import Calls
from keras_strategies.keras_compat.state_scope import StatePolicy
from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.keras_compat.variables.values import autocast_dtype
from keras_strategies.rows.code_names import Lines

# Sums of these over replicas are taken in float32, and rounded once.
HALF = ("float16", "bfloat16")


class ReplicaState(StatePolicy):
    """The variables of one replica in a layer call: a copy of each that it reads.

    A copy is made when a variable is first read, so that only variables that a call
    uses are moved. Updates are stored here until they are merged.

    Args:
        copy: returns the replica's copy of a variable.
        cast: returns a copy in another dtype, with a separate gradient; None without
            gradient.
        assigned: `assigned(variable, read, value)` returns the value to read after an
            assignment, where `read()` is the value before; None for `value` itself.
        used: `used(variable, value, dtype)` returns what an operation reads, if it is
            not the copy itself; the dtype is that of `autocast_dtype`.
    """

    def __init__(
        self,
        copy: Callable[[Any], Any],
        cast: Callable[[Any, str], Any] = lambda value, dtype: None,
        assigned: Callable[[Any, Callable[[], Any], Any], Any] | None = None,
        used: Callable[[Any, Any, str | None], Any] | None = None,
    ):
        self._copy = copy
        self._cast = cast
        self._assigned = assigned
        self._used = used
        self._copies: dict[int, Any] = {}
        self._values: dict[int, Any] = {}
        # By variable, and by the number of the read where each has its own gradient.
        self.reads: dict[Any, tuple[Any, Any]] = {}
        self.updates: dict[int, tuple[Any, Any]] = {}

    def read(self, variable: Any) -> Any:
        dtype = autocast_dtype(variable)
        value = self._read(variable, dtype == "float16")
        if value is None or self._used is None:
            return value
        return self._used(variable, value, dtype)

    def _read(self, variable: Any, in_float16: bool = False) -> Any:
        key = id(variable)
        value = self._values.get(key)
        if value is None:
            value = self._copy(variable)
            if value is None:
                return None
            self._values[key] = self._copies[key] = value
        if value is self._copies.get(key):
            if in_float16:
                cast = self._float16_read(variable, value)
                if cast is not None:
                    return cast
            self.reads[key] = (variable, value)
        return value

    def _float16_read(self, variable: Any, value: Any) -> Any:
        """The value in float16, for one read by a layer that autocasts to it.

        On one device the gradient of such a read is a float16 tensor: if the sum over
        the batch overflows it is infinite, and a `LossScaleOptimizer` skips the step.
        Sums over the rows of a replica are smaller. So each read has a separate
        gradient, which is summed over replicas in float32 and rounded to float16.
        """
        cast = self._cast(value, "float16")
        if cast is not None:
            self.reads[id(variable), len(self.reads)] = (variable, cast)
        return cast

    def assign(self, variable: Any, value: Any) -> None:
        if self._assigned is not None:
            value = self._assigned(variable, lambda: self._read(variable), value)
        self._values[id(variable)] = value
        self.updates[id(variable)] = (variable, value)


class AddedState(StatePolicy):
    """The variables of a metric on one replica, whose update may only add to them.

    What is added does not depend on the value before, so it is the metric's for the
    replica's rows. `updates` has the sums of what was added.
    """

    patches = ("custom loops",)

    def __init__(self) -> None:
        #: As `ReplicaState`: none, and by variable what was added to it.
        self.reads: dict[Any, tuple[Any, Any]] = {}
        self.updates: dict[int, tuple[Any, Any]] = {}

    def read(self, variable: Any) -> Any:
        raise _not_added(variable, "reads")

    def assign(self, variable: Any, value: Any) -> None:
        raise _not_added(variable, "assigns")

    def add(self, variable: Any, delta: Any) -> None:
        """Adds to a variable, by `assign_add` or `assign_sub`."""
        ops = keras.ops
        delta = ops.convert_to_tensor(delta, dtype=variable.dtype)
        delta = ops.broadcast_to(delta, variable.shape)
        _, before = self.updates.get(id(variable), (variable, None))
        total = delta if before is None else before + delta
        self.updates[id(variable)] = (variable, total)


def _not_added(variable: Any, verb: str) -> Exception:
    return InvalidArgumentError(
        f"`update_state` {verb} variable {variable.path!r}. A metric is updated by "
        "replicas if it changes its variables by `assign_add` and `assign_sub` only."
    )


#: The variables of one replica in a layer call.
CallState = ReplicaState | AddedState


@dataclass
class ReplicaResult:
    """Results of one replica's call of the layer.

    Args:
        outputs: the outputs of the layer.
        state: the variables that were read and assigned.
        losses: the losses that were added.
        calls: what the call computed with; None where it is not noted.
        lines: the lines of the user's that ran; None where they are not noted.
        has_diverged: whether it called other sums than those of the proof; None
            without any in it.
    """

    outputs: Any
    state: CallState
    losses: list[Any]
    calls: Calls | None = None
    lines: Lines | None = None
    has_diverged: bool | None = None
    leaves: list[Any] = field(init=False)
    masks: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.leaves = leaves_of(self.outputs)
        self.masks = [get_mask(leaf) for leaf in self.leaves]


def merged_value(variable: Any, values: list[Any], weights: list[Any]) -> Any:
    """The merged value of a variable that replicas assigned.

    For sums (metrics), the increments of all replicas are added. Other floats are
    averaged with rows as weights, which is exact for a moving average of a batch mean
    and keeps a value that is equal on all replicas. Counters and seeds are those of the
    first replica.

    Args:
        variable: the `keras.Variable`, with its value before the call.
        values: the assigned values, in replica order.
        weights: each replica's fraction of the rows.
    """
    first = values[0]
    if len(values) < len(weights):
        return first
    if variable.dtype in HALF:
        values = [keras.ops.cast(value, "float32") for value in values]
        first = values[0]
    if variable.aggregation == "sum":
        old = keras.ops.cast(keras.ops.convert_to_tensor(variable), first.dtype)
        added = [value - old for value in values[1:]]
        return sum(added, start=first)
    if "float" in variable.dtype and (variable.aggregation != "only_first_replica"):
        moves = [
            (value - first) * keras.ops.cast(weight, first.dtype)
            for value, weight in zip(values[1:], weights[1:], strict=True)
        ]
        return sum(moves, start=first)
    return first


def has_rows(leaf: Any, rows: Any) -> bool:
    """Whether the first axis of a leaf is a batch axis of so many rows.

    Sizes can be tensors in a TensorFlow graph; an axis of unknown length is a
    batch axis there.
    """
    if not keras.ops.is_tensor(leaf) or len(leaf.shape) == 0:
        return False
    if isinstance(rows, int):
        return leaf.shape[0] is None or leaf.shape[0] == rows
    return leaf.shape[0] is None
