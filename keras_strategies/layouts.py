"""Layout rules of variables on a mesh of devices, independent of the framework.

A layout has an entry for each axis of a variable: the mesh axis that it is sharded
along, or None. Axes without an entry are not sharded: `()` is a copy on every device.
"""

from __future__ import annotations

import abc
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_strategies.devices import Device
from keras_strategies.errors import InvalidArgumentError, LayoutError
from keras_strategies.types import check_count

Axes = tuple[str | None, ...]

BATCH_AXIS = "batch"
MODEL_AXIS = "model"

# Shards smaller than this are not worth a message between devices.
MIN_SHARD_BYTES = 64 * 1024


class LayoutRule(abc.ABC):
    """Rule for the layout of each variable."""

    name: str
    # Integers are counters and states of random generators, which are not sharded.
    shards_integers = False

    @abc.abstractmethod
    def axes(self, path: str, shape: Sequence[int], itemsize: int) -> Axes:
        """The layout of a variable.

        Args:
            path: str, the variable's path, `"block/dense/kernel"`.
            shape: sequence of int.
            itemsize: int, bytes of one element.

        Returns:
            tuple of str or None, as long as needed, `()` for a copy everywhere.
        """

    def check_matches(self) -> None:  # noqa: B027
        """Raises if a pattern has matched no variable so far."""


class MappedLayouts(LayoutRule):
    """Layouts by regular expressions that match the whole path, as in a `LayoutMap`.

    Args:
        patterns: mapping from a path or a regular expression to a layout.
        allow_unmatched: bool, whether patterns may match nothing.
    """

    name = "map"
    shards_integers = True

    def __init__(
        self,
        patterns: Mapping[str, Sequence[str | None]],
        allow_unmatched: bool = False,
    ):
        for key in patterns:
            try:
                re.compile(key)
            except re.error as error:
                raise LayoutError(
                    f"{key!r} in the layout map is no regular expression: {error}. "
                    "Write a path such as 'dense/kernel', with a backslash before "
                    "brackets, or an expression such as '.*/kernel'."
                ) from error
        self._patterns = {key: tuple(axes) for key, axes in patterns.items()}
        self._allow_unmatched = allow_unmatched
        self._matched: set[str] = set()
        # Paths of variables and of layer outputs that were looked up.
        self._seen: dict[str, None] = {}

    @property
    def patterns(self) -> dict[str, Axes]:
        """dict from pattern to layout."""
        return dict(self._patterns)

    def axes(self, path: str, shape: Sequence[int], itemsize: int) -> Axes:
        return self.find(path) or ()

    def find(self, path: str) -> Axes | None:
        """The layout of a path; None where no pattern fits."""
        self._seen[path] = None
        if path in self._patterns:
            self._matched.add(path)
            return self._patterns[path]
        found = [key for key in self._patterns if re.fullmatch(key, path)]
        if len(found) > 1:
            raise LayoutError(
                f"{path!r} matches {len(found)} patterns of the layout map: {found}. "
                "Change them so that a path matches at most one."
            )
        self._matched.update(found)
        return self._patterns[found[0]] if found else None

    def check_matches(self) -> None:
        """Raises `LayoutError` if a pattern has matched no variable or output so far.

        Patterns of layers' outputs are checked only after layers have been called.
        """
        unmatched = [key for key in self._patterns if key not in self._matched]
        outputs = [path for path in self._seen if path.endswith(_OUTPUT)]
        variables = [path for path in self._seen if not path.endswith(_OUTPUT)]
        if not outputs:
            unmatched = [key for key in unmatched if not key.endswith(_OUTPUT)]
        if self._allow_unmatched or not unmatched:
            return
        lines = []
        for key in unmatched:
            among = outputs if key.endswith(_OUTPUT) else variables
            found = ", ".join(map(repr, closest_paths(key, among)))
            lines.append(f"{key!r} (closest: {found or 'nothing similar'})")
        raise LayoutError(
            "Patterns of the layout map match no variable of a model made in the "
            f"strategy's scope: {'; '.join(lines)}. A pattern is a path or a regular "
            "expression that matches the full path. Correct or remove it. If it is "
            "for a model that is created later, create that one first, or pass "
            "`allow_unmatched=True` to the strategy."
        )


_OUTPUT = "/output"


def closest_paths(pattern: str, paths: Sequence[str]) -> list[str]:
    """Three paths most similar to a pattern, compared in full and by their last parts.

    >>> closest_paths(".*dense/kernal", ["net/dense/kernel", "net/conv/bias"])
    ['net/dense/kernel']
    """
    text = re.sub(r"\.[*+?]|[\\^$*+?()\[\]{}|]", "", pattern).strip("/")
    depth = text.count("/") + 1
    ends = {path: "/".join(path.split("/")[-depth:]) for path in paths}
    scores = {
        path: max(
            difflib.SequenceMatcher(None, text, compared).ratio()
            for compared in (path, end)
        )
        for path, end in ends.items()
    }
    similar = [path for path, score in scores.items() if score > 0.5]
    return sorted(similar, key=lambda path: -scores[path])[:3]


# `query/kernel` is (features, heads, size) and `attention_output/kernel` is (heads,
# size, features) in Keras's attention layers, grouped or not.
_HEADS = (
    (re.compile(r".*/(query|key|value)/kernel$"), 1),
    (re.compile(r".*/attention_output/kernel$"), 0),
)


@dataclass(frozen=True)
class AutoLayouts(LayoutRule):
    """Shards large variables along the model axis.

    Attention kernels are sharded between heads, other variables along the longest
    divisible axis (the last one of several): a feed-forward pair (64, 256), (256, 64)
    between its hidden units, so that only sums of the second layer are communicated
    (Shoeybi et al., "Megatron-LM", 2019), and an embedding between its words.

    Args:
        axis: str, the model axis.
        size: int, how many devices it has.
        min_shard_bytes: int, the minimum size of a shard; smaller variables are
            replicated.
    """

    axis: str
    size: int
    min_shard_bytes: int = MIN_SHARD_BYTES
    name: str = "auto"

    def axes(self, path: str, shape: Sequence[int], itemsize: int) -> Axes:
        if _is_small(shape, itemsize, self.size, self.min_shard_bytes):
            return ()
        for pattern, heads in _HEADS:
            if len(shape) == 3 and pattern.match(path):
                if shape[heads] % self.size == 0:
                    return _along(self.axis, heads)
                break
        return _longest(shape, self.size, self.axis)


@dataclass(frozen=True)
class FullyShardedLayouts(LayoutRule):
    """Shards large variables over the data axis, and over the model axis if any.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", 2020, stage 3.

    Args:
        axis: str, the data axis.
        size: int, how many devices it has.
        min_shard_bytes: int, variables with smaller shards are replicated.
        model: `AutoLayouts` of the model axis; None without one.
    """

    axis: str
    size: int
    min_shard_bytes: int = MIN_SHARD_BYTES
    model: AutoLayouts | None = None
    name: str = "fsdp"

    def axes(self, path: str, shape: Sequence[int], itemsize: int) -> Axes:
        other = self.model.axes(path, shape, itemsize) if self.model else ()
        parts = self.size * (self.model.size if any(other) else 1)  # type: ignore[union-attr]
        if _is_small(shape, itemsize, parts, self.min_shard_bytes):
            return other
        taken = [i for i, axis in enumerate(other) if axis is not None]
        own = _longest(shape, self.size, self.axis, without=taken)
        if not own:
            return other
        merged = [
            (own[i] if i < len(own) else None) or (other[i] if i < len(other) else None)
            for i in range(max(len(own), len(other)))
        ]
        return tuple(merged)


def _is_small(
    shape: Sequence[int], itemsize: int, parts: int, min_shard_bytes: int
) -> bool:
    nbytes = math.prod(shape) * itemsize
    return parts < 2 or len(shape) == 0 or nbytes < parts * min_shard_bytes


def _along(axis: str, position: int) -> Axes:
    return (*[None] * position, axis)


def _longest(
    shape: Sequence[int], parts: int, axis: str, without: Sequence[int] = ()
) -> Axes:
    """Shards the longest divisible dimension, the last one of several; else `()`."""
    fitting = [
        (length, i)
        for i, length in enumerate(shape)
        if i not in without and length > 0 and length % parts == 0
    ]
    return _along(axis, max(fitting)[1]) if fitting else ()


@dataclass(frozen=True)
class VariableMesh:
    """A mesh of devices and the layouts of variables on it.

    Args:
        shape: tuple of int, devices along each axis; batches are split along the
            first one.
        axes: tuple of str, the axes' names.
        devices: tuple of `Device`, in the order of a row-major array.
        rule: the layout of each variable.
        outputs: layouts of layers' outputs, for paths that end in `/output`.
        own: pair of int, the range of this process's devices; None for all.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    devices: tuple[Device, ...]
    rule: LayoutRule
    outputs: MappedLayouts | None = None
    own: tuple[int, int] | None = None

    @property
    def own_devices(self) -> tuple[Device, ...]:
        """The devices of this process; those of others have the same names."""
        return self.devices if self.own is None else self.devices[slice(*self.own)]

    @property
    def batch_axis(self) -> str:
        """str, the axis along which batches are split."""
        return self.axes[0]

    @property
    def sizes(self) -> dict[str, int]:
        """dict from the name of an axis to its number of devices."""
        return dict(zip(self.axes, self.shape, strict=True))

    @property
    def rows(self) -> tuple[tuple[Device, ...], ...]:
        """The devices of each row of the mesh, one row for each batch shard."""
        width = len(self.devices) // self.shape[0]
        return tuple(
            self.devices[i * width : (i + 1) * width] for i in range(self.shape[0])
        )

    def layout(
        self, path: str, shape: Sequence[int], itemsize: int = 4, is_float: bool = True
    ) -> Axes:
        """The layout of a variable, without trailing None.

        Raises:
            ValueError: if the layout does not fit the shape.
        """
        if not is_float and not self.rule.shards_integers:
            return ()
        return self.checked(path, shape, self.rule.axes(path, shape, itemsize))

    def checked(self, path: str, shape: Sequence[int], axes: Axes) -> Axes:
        """The layout without trailing None, after checking that it fits the shape."""
        named = [axis for axis in axes if axis is not None]
        problem = ""
        if len(axes) > len(shape):
            problem = f"which has {len(axes)} axes"
        elif unknown := [axis for axis in named if axis not in self.axes]:
            problem = f"but the mesh has the axes {self.axes} and no {unknown[0]!r}"
        elif len(set(named)) < len(named):
            problem = "which names an axis of the mesh twice"
        else:
            for i, (length, axis) in enumerate(zip(shape, axes, strict=False)):
                if axis is not None and length % self.sizes[axis]:
                    problem = (
                        f"but axis {i}, {length}, does not divide over the "
                        f"{self.sizes[axis]} devices of {axis!r}"
                    )
        if problem:
            raise LayoutError(
                f"Variable {path!r} of shape {tuple(shape)} has the layout {axes}, "
                f"{problem}. Change its entry in the layout map, or remove it to "
                "replicate the variable."
            )
        while axes and axes[-1] is None:
            axes = axes[:-1]
        return axes

    def shard_shape(self, shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
        """The shape of a shard."""
        return tuple(
            length // (self.sizes[axis] if axis else 1)
            for length, axis in zip(
                shape, (*axes, *[None] * (len(shape) - len(axes))), strict=True
            )
        )


class OneGroupLayouts(LayoutRule):
    """Shards over all devices what layouts on a mesh of several axes shard.

    A variable is sharded along a dimension for which the mesh names an axis, the
    longest that all devices divide, or else along another one.

    Args:
        mesh: the mesh with its layouts.
    """

    def __init__(self, mesh: VariableMesh):
        self._mesh = mesh
        self.name = mesh.rule.name
        self.shards_integers = mesh.rule.shards_integers

    def axes(self, path: str, shape: Sequence[int], itemsize: int) -> Axes:
        mesh, count = self._mesh, len(self._mesh.devices)
        named = mesh.layout(path, shape, itemsize)
        others = [i for i in range(len(shape)) if i >= len(named) or named[i] is None]
        if len(others) == len(shape):
            return ()
        along = _longest(shape, count, mesh.batch_axis, others)
        return along or _longest(shape, count, mesh.batch_axis)

    def check_matches(self) -> None:
        self._mesh.rule.check_matches()


def mesh_shape(count: int, model_parallel: int) -> tuple[int, int]:
    """The shape of a mesh of `count` devices, data x model.

    Raises:
        ValueError: if `model_parallel` does not divide `count`.

    >>> mesh_shape(8, 2)
    (4, 2)
    """
    kind = "the number of devices along the model axis,"
    check_count("model_parallel", model_parallel, 1, kind)
    if count % model_parallel:
        fitting = [n for n in range(1, count + 1) if count % n == 0]
        raise InvalidArgumentError(
            f"`model_parallel` is {model_parallel}, which does not divide the number "
            f"of devices, {count}. Use one of {fitting}, or pass other `devices`."
        )
    return count // model_parallel, model_parallel
