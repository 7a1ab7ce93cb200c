"""The data-parallel call of a layer, for backends whose replicas are separate.

# Why the call, and not the step

A step of `Model.fit` runs once, on the global batch, as Keras or its user wrote
it. Only the outermost calls of layers in it (`self(x, training=True)`) are
parallel: the rows of their arguments are split over the replicas, each replica
calls the layer on its rows, and the outputs come back as one global batch. The
loss, its reduction and masks, every metric, `add_loss`, clipping, accumulation and
the optimizer see what they see on one device, so they need no distributed twin,
and a custom `train_step` is exact whatever it computes. Gradients cross the
boundary once: the outputs' gradient is split by rows, each replica runs its own
backward pass, and the gradients of the variables are summed.

What is left to combine is what happens *inside* the layer: batch statistics (see
`training/batch_norm.py`), losses that layers add, and state that they update.
"""

from __future__ import annotations

import abc
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies import keras_compat
from keras_strategies.errors import BatchError

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy

# Rows that are called once and doubled to see what kind of loss a layer adds.
_PROBE_ROWS = 4


class ReplicaScope(keras.StatelessScope):
    """The state of one replica: its own copy of each variable that it reads.

    Copies are made when a variable is first read, so that only what a call needs
    is moved, and updates stay in the scope until they are merged.

    Args:
        copy: returns the replica's copy of a variable.
        assigned: the backend's `DataParallelCall.assigned_value`; None where no
            gradients are computed.
    """

    def __init__(
        self,
        copy: Callable[[Any], Any],
        cast: Callable[[Any, str], Any] = lambda value, dtype: None,
        assigned: Callable[[Any, Callable[[], Any], Any], Any] | None = None,
    ):
        super().__init__(collect_losses=True, initialize_variables=False)
        self._copy = copy
        self._cast = cast
        self._assigned = assigned
        self._copies: dict[int, Any] = {}
        # By variable, and by the number of the read where each has its own gradient.
        self.reads: dict[Any, tuple[Any, Any]] = {}
        self.updates: dict[int, tuple[Any, Any]] = {}

    def get_current_value(self, variable: Any) -> Any:
        value = self._current(variable)
        if value is not None and value is self._copies.get(id(variable)):
            cast = self._in_half_range(variable, value)
            if cast is not None:
                return cast
        return self._read(variable)

    def _current(self, variable: Any) -> Any:
        key = id(variable)
        if key not in self.state_mapping:
            value = self._copy(variable)
            if value is None:
                return None
            self.state_mapping[key] = self._copies[key] = value
        return self.state_mapping[key]

    def _read(self, variable: Any) -> Any:
        value = self._current(variable)
        if value is not None and value is self._copies.get(id(variable)):
            self.reads[id(variable)] = (variable, value)
        return value

    def _in_half_range(self, variable: Any, value: Any) -> Any:
        """The value as float16 where the layer reads it so, for one read.

        On one device the gradient of such a read is a float16 tensor: it is infinite
        where the sum over the batch is, and a `LossScaleOptimizer` skips the step.
        Sums over the rows of a replica are smaller. So each read has a gradient of
        its own, which is summed over replicas in float32 and rounded to float16.
        """
        if keras_compat.autocast_dtype(variable) != "float16":
            return None
        cast = self._cast(value, "float16")
        if cast is not None:
            self.reads[id(variable), len(self.reads)] = (variable, cast)
        return cast

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        if self._assigned is not None:
            value = self._assigned(variable, lambda: self._read(variable), value)
        self.state_mapping[id(variable)] = value
        self.updates[id(variable)] = (variable, value)


@dataclass
class ReplicaResult:
    """What one replica's call of the layer left behind."""

    outputs: Any
    scope: ReplicaScope
    leaves: list[Any] = field(init=False)
    masks: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.leaves = keras.tree.flatten(self.outputs)
        self.masks = [keras_compat.get_mask(leaf) for leaf in self.leaves]


@dataclass
class Channel:
    """One tensor on each replica, and how the tensors become a global one.

    Args:
        parts: the tensors, in replica order.
        weights: None to concatenate the parts by rows; otherwise the factors of a
            weighted sum, one for each part.
    """

    parts: list[Any]
    weights: list[Any] | None = None


class DataParallelCall(abc.ABC):
    """Calls a layer on all replicas, each on its rows of the global batch."""

    def __init__(self, strategy: Strategy):
        self.strategy = strategy
        self.placement = strategy.placement
        self._not_by_rows: weakref.WeakSet[Any] = weakref.WeakSet()
        self._loss_kinds: weakref.WeakKeyDictionary[Any, dict[Any, list[str]]] = (
            weakref.WeakKeyDictionary()
        )

    # What a backend provides.

    @abc.abstractmethod
    def sizes(
        self,
        layer: Any,
        rows: Any,
        call_few: Callable[[], int],
        tensors: Sequence[Any],
    ) -> list[Any] | None:
        """Rows for each replica that takes part; None to call the layer whole.

        `call_few()` calls the layer on a few rows, whose number it returns, and
        leaves no trace.
        """

    @abc.abstractmethod
    def split(self, tensor: Any, sizes: Sequence[Any]) -> list[Any]:
        """Slices of a tensor along axis 0, each for its replica's device."""

    @abc.abstractmethod
    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs one task on each replica, in its context; results in order."""

    @abc.abstractmethod
    def copy_variable(self, replica_id: int, variable: Any) -> Any:
        """The value of a variable for a replica, on its device."""

    @abc.abstractmethod
    def assigned_value(self, variable: Any, read: Callable[[], Any], value: Any) -> Any:
        """The value that a replica reads from a variable after assigning `value`.

        Assignments are not differentiable: the gradient of the value read is the
        gradient of the variable, and `value` gets none.

        Args:
            variable: `keras.Variable`.
            read: returns the value of the variable before the assignment.
            value: tensor of the variable's shape and dtype.
        """

    @abc.abstractmethod
    def cast_copy(self, replica_id: int, value: Any, dtype: str) -> Any:
        """A copy of a variable in a dtype, with a gradient of its own.

        None where no gradient is recorded, or not at this place.
        """

    @abc.abstractmethod
    def connect(
        self,
        inputs: Sequence[tuple[Any, list[Any]]],
        results: Sequence[ReplicaResult],
        channels: Sequence[Channel],
    ) -> list[Any]:
        """Global tensors for the channels, with gradients through the replicas.

        Args:
            inputs: pairs of a global tensor and its slices.
            results: the replicas' results, whose scopes hold the variables read.
            channels: what is to be combined.
        """

    @abc.abstractmethod
    def to_lead(self, tensor: Any) -> Any:
        """The tensor, without gradient, on the device of the global batch."""

    @abc.abstractmethod
    def probe_input(self, tensor: Any, rows: int) -> Any:
        """The first rows of a tensor, or what may stand in for them."""

    @abc.abstractmethod
    def probe(self, fn: Callable[[], list[Any]]) -> list[float]:
        """Calls `fn` without gradients and returns its scalars as floats."""

    # The call.

    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with keras_compat.layer_calls_through(None):
            whole = call
            leaves = keras.tree.flatten((args, kwargs))
            if layer in self._not_by_rows or not keras_compat.is_built(layer):
                return whole(*args, **kwargs)
            if any(isinstance(leaf, keras.KerasTensor) for leaf in leaves):
                return whole(*args, **kwargs)
            leaves = [_as_tensor(leaf) for leaf in leaves]
            rows = _rows(leaves)
            if rows is None:
                return whole(*args, **kwargs)
            tensors = [leaf for leaf in leaves if _has_rows(leaf, rows)]
            structure = (args, kwargs)

            def call_few() -> int:
                few = self._few_rows(structure, leaves, rows, 1)
                with ReplicaScope(keras_compat.raw_value):
                    call(*few[0], **few[1])
                return min(rows, _PROBE_ROWS)

            sizes = self.sizes(layer, rows, call_few, tensors)
            if sizes is None:
                return whole(*args, **kwargs)
            result = self._call_split(layer, call, structure, leaves, rows, sizes)
            if result is None:
                self._not_by_rows.add(layer)
                return whole(*args, **kwargs)
            return result[0]

    def _call_split(
        self,
        layer: Any,
        call: Callable[..., Any],
        structure: Any,
        leaves: list[Any],
        rows: Any,
        sizes: list[Any],
    ) -> tuple[Any] | None:
        """The global outputs in a tuple; None if they do not follow the rows."""
        inputs: list[tuple[Any, list[Any]]] = []
        columns: list[list[Any]] = []
        for leaf in leaves:
            if _has_rows(leaf, rows):
                slices = self._split_with_mask(leaf, sizes)
                inputs.append((leaf, slices))
            else:
                slices = [leaf] * len(sizes)
            columns.append(slices)

        def task(replica_id: int) -> Callable[[], ReplicaResult]:
            def run() -> ReplicaResult:
                own = [column[replica_id] for column in columns]
                args, kwargs = keras.tree.pack_sequence_as(structure, own)
                scope = ReplicaScope(
                    lambda v: self.copy_variable(replica_id, v),
                    lambda value, dtype: self.cast_copy(replica_id, value, dtype),
                    self.assigned_value,
                )
                with scope:
                    outputs = call(*args, **kwargs)
                return ReplicaResult(outputs, scope)

            return run

        results: list[ReplicaResult] = self.run([task(i) for i in range(len(sizes))])
        channels = self._output_channels(layer, results, sizes)
        if channels is None:
            return None
        channels_of_losses = self._loss_channels(
            layer, call, structure, leaves, rows, sizes, results
        )
        connected = self.connect(
            inputs,
            results,
            [c for c in channels if c is not None] + channels_of_losses,
        )
        outputs = self._global_outputs(results, channels, connected)
        self._merge_updates(results, sizes, rows)
        keras_compat.clear_losses(layer)
        if channels_of_losses:
            # Functional models refuse `add_loss` on themselves; their base does not.
            losses = connected[-len(channels_of_losses) :]
            keras.layers.Layer.add_loss(layer, losses)
        return (outputs,)

    def _split_with_mask(self, leaf: Any, sizes: list[Any]) -> list[Any]:
        slices = self.split(leaf, sizes)
        mask = keras_compat.get_mask(leaf)
        if mask is not None:
            for part, mask_part in zip(slices, self.split(mask, sizes), strict=True):
                keras_compat.set_mask(part, mask_part)
        return slices

    # Outputs.

    def _output_channels(
        self, layer: Any, results: list[ReplicaResult], sizes: list[Any]
    ) -> list[Channel | None] | None:
        channels: list[Channel | None] = []
        for parts in zip(*(result.leaves for result in results), strict=True):
            if not keras.ops.is_tensor(parts[0]):
                channels.append(None)
            elif all(
                _has_rows(part, size) for part, size in zip(parts, sizes, strict=True)
            ):
                channels.append(Channel(list(parts)))
            else:
                warnings.warn(
                    f"Layer {layer.name!r} ({type(layer).__name__}) returned a tensor "
                    f"of shape {tuple(parts[0].shape)} for a slice of {sizes[0]} "
                    "rows: it does not keep the batch axis, so its replicas' outputs "
                    "cannot be joined. It is called on one device with the whole "
                    "batch instead, which is exact but not parallel. Return one row "
                    "per sample, or use `add_loss` for scalars, to run it on all "
                    f"replicas of {self.strategy!r}.",
                    stacklevel=5,
                )
                return None
        return channels

    def _global_outputs(
        self,
        results: list[ReplicaResult],
        channels: list[Channel | None],
        connected: list[Any],
    ) -> Any:
        values = iter(connected)
        leaves = []
        for i, channel in enumerate(channels):
            if channel is None:
                leaves.append(results[0].leaves[i])
                continue
            value = next(values)
            masks = [result.masks[i] for result in results]
            if masks[0] is not None:
                keras_compat.set_mask(value, self.joined(masks))
            leaves.append(value)
        return keras.tree.pack_sequence_as(results[0].outputs, leaves)

    # Losses that layers add.

    def _loss_channels(
        self,
        layer: Any,
        call: Callable[..., Any],
        structure: Any,
        leaves: list[Any],
        rows: Any,
        sizes: list[Any],
        results: list[ReplicaResult],
    ) -> list[Channel]:
        """How each loss of the replicas becomes the loss of the global batch.

        A loss with one row per sample is concatenated. A scalar is either a mean
        over rows (then replicas count by their rows; a term of the weights alone
        is one too) or a sum over rows (then they add up). Which of the two is
        found once, by calling the layer on a few rows and on the same rows twice:
        a sum doubles, a mean does not.
        """
        per_loss = list(zip(*(result.scope.losses for result in results), strict=True))
        if not per_loss:
            return []
        kinds: list[str] | None = None
        channels = []
        for i, parts in enumerate(per_loss):
            if len(parts[0].shape) > 0 and all(
                _has_rows(part, size) for part, size in zip(parts, sizes, strict=True)
            ):
                channels.append(Channel(list(parts)))
                continue
            if kinds is None:
                kinds = self._kinds_of_losses(
                    layer, call, structure, leaves, rows, len(per_loss)
                )
            if kinds[i] == "sum":
                weights = [1.0] * len(parts)
            else:
                weights = self.fractions(sizes, rows)
            channels.append(Channel(list(parts), weights))
        return channels

    def _few_rows(
        self, structure: Any, leaves: list[Any], rows: Any, repeats: int
    ) -> Any:
        """The arguments with a few rows, repeated, in place of the batch."""

        def few(leaf: Any) -> Any:
            if not _has_rows(leaf, rows):
                return leaf
            first = self.probe_input(leaf, _PROBE_ROWS)
            return keras.ops.concatenate([first] * repeats, axis=0)

        return keras.tree.pack_sequence_as(structure, [few(leaf) for leaf in leaves])

    def fractions(self, sizes: list[Any], rows: Any) -> list[Any]:
        """The share of each replica in the global batch."""
        return [size / rows for size in sizes]

    def _kinds_of_losses(
        self,
        layer: Any,
        call: Callable[..., Any],
        structure: Any,
        leaves: list[Any],
        rows: Any,
        count: int,
    ) -> list[str]:
        known = self._loss_kinds.setdefault(layer, {})
        key = (count, flags(leaves, {}))
        if key in known:
            return known[key]

        def losses(repeats: int) -> list[Any]:
            args, kwargs = self._few_rows(structure, leaves, rows, repeats)
            scope = ReplicaScope(keras_compat.raw_value)
            with scope:
                call(*args, **kwargs)
            return [keras.ops.sum(loss) for loss in scope.losses]

        once = self.probe(lambda: losses(1))
        twice = self.probe(lambda: losses(2))
        if not len(once) == len(twice) == count:
            raise BatchError(
                f"Layer {layer.name!r} added {count} losses to one call and "
                f"{len(once)} to another with the same arguments; how they belong to "
                "the batch cannot be found. Add the same losses on every call, or "
                "one value per sample."
            )
        # 2 for a sum, 1 for a mean: the nearer one in ratio, since dropout and
        # the like blur both.
        kinds = [
            "sum" if abs(b) > 1.414 * abs(a) else "mean"
            for a, b in zip(once, twice, strict=True)
        ]
        known[key] = kinds
        return kinds

    # Replicas of other workers.

    def joined(self, parts: list[Any]) -> Any:
        """The rows of all replicas, without gradient, from those of the local ones."""
        return keras.ops.concatenate([self.to_lead(part) for part in parts], axis=0)

    def all_fractions(self, sizes: list[Any], rows: Any) -> list[Any]:
        """The share in the global batch of each replica, of all workers."""
        return self.fractions(sizes, rows)

    def on_all_workers(self, columns: list[list[Any]]) -> list[list[Any]]:
        """For each variable the values of all replicas, from those of the local ones.

        Values of one variable have equal shapes.
        """
        return columns

    # State that layers update.

    def _merge_updates(
        self, results: list[ReplicaResult], sizes: list[Any], rows: Any
    ) -> None:
        """Makes one value of what the replicas assigned to each variable.

        Sums (metrics) add up what each replica added. Other floats are averaged
        by rows, which is exact for a moving average of a batch mean and leaves
        alone what all replicas agree on. Counters and seeds are the first's.
        """
        first = results[0].scope.updates
        columns = [
            [
                self.to_lead(result.scope.updates[key][1])
                for result in results
                if key in result.scope.updates
            ]
            for key in first
        ]
        variables = [variable for variable, _ in first.values()]
        weights = self.all_fractions(sizes, rows)
        everywhere = self.on_all_workers(columns)
        for variable, values in zip(variables, everywhere, strict=True):
            variable.assign(_merged(variable, values, weights))


def _merged(variable: Any, values: list[Any], weights: list[Any]) -> Any:
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


# Sums of these over replicas are taken in float32, and rounded once.
HALF = ("float16", "bfloat16")


def flags(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """`training` and the like, which can change what a call does."""
    given = (*args, *kwargs.values())
    return tuple(v for v in given if v is None or isinstance(v, (bool, str)))


def _as_tensor(leaf: Any) -> Any:
    """NumPy arrays become tensors; tensors keep their mask; the rest stays."""
    if hasattr(leaf, "__array__") and not keras.ops.is_tensor(leaf):
        if isinstance(leaf, keras.Variable):
            return leaf
        return keras.ops.convert_to_tensor(leaf)
    return leaf


def _rows(leaves: list[Any]) -> Any:
    """The rows of the first tensor with a batch axis; None without one."""
    for leaf in leaves:
        if keras.ops.is_tensor(leaf) and len(leaf.shape) > 0:
            return keras.ops.shape(leaf)[0]
    return None


def _has_rows(leaf: Any, rows: Any) -> bool:
    """Whether the first axis of a leaf is a batch axis of so many rows.

    Sizes can be tensors in a TensorFlow graph; an axis of unknown length is a
    batch axis there.
    """
    if not keras.ops.is_tensor(leaf) or len(leaf.shape) == 0:
        return False
    if isinstance(rows, int):
        return leaf.shape[0] is None or leaf.shape[0] == rows
    return leaf.shape[0] is None
