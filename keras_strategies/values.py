"""Values that have one component for each replica."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from keras_strategies.errors import ContextError, InvalidArgumentError, InvalidTypeError


class DistributedValues:
    """A value with one component per local replica, in replica order.

    Args:
        values: the components.
    """

    def __init__(self, values: Sequence[Any]):
        self._values = tuple(values)
        if not self._values:
            raise InvalidArgumentError(
                f"{type(self).__name__} needs a component for each replica; "
                "received none."
            )

    @property
    def values(self) -> tuple[Any, ...]:
        """The components, in replica order."""
        return self._values

    def __iter__(self) -> Iterator[Any]:
        raise ContextError(
            f"A {type(self).__name__} cannot be iterated over: it holds one value "
            "per replica. Use `strategy.experimental_local_results(value)`."
        )

    def __len__(self) -> int:
        return len(self.values)

    def __getattr__(self, name: str) -> Any:
        text = f"{type(self).__name__!r} object has no attribute {name!r}."
        if name == "numpy":
            text += (
                " It holds one value per replica: reduce it with `x = "
                "strategy.reduce('sum', value)` or unpack it with "
                "`strategy.experimental_local_results(value)`, and write "
                "`keras.ops.convert_to_numpy(x)`."
            )
        raise AttributeError(text, name=name, obj=self)

    def _no_number(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidTypeError(
            f"A {type(self).__name__} is no number: it holds one value per replica. "
            "Reduce it with `strategy.reduce('sum', value)`, or 'mean', or unpack it "
            "with `strategy.experimental_local_results(value)`."
        )

    __float__ = __int__ = __complex__ = __index__ = _no_number
    __neg__ = __abs__ = __round__ = _no_number
    __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __pow__ = _no_number
    __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rpow__ = _no_number
    __lt__ = __le__ = __gt__ = __ge__ = _no_number

    def __format__(self, specification: str) -> str:
        if specification:
            self._no_number()
        return str(self)

    def __repr__(self) -> str:
        body = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(self.values))
        return f"{type(self).__name__}:{{\n{body}\n}}"


class PerReplica(DistributedValues):
    """Components that may differ between replicas."""


class Mirrored(DistributedValues):
    """Components that are kept equal on all replicas."""


def map_structure(fn: Callable[..., Any], *structures: Any) -> Any:
    """Applies `fn` to the leaves of nested lists, tuples and mappings.

    Containers keep their type, named tuples included; anything else, a
    `DistributedValues` or None among them, is a leaf.
    """
    first = structures[0]
    # Called for each batch: the abstract `Mapping` is slow to check, and comes last.
    if isinstance(first, (list, tuple)):
        lengths = {len(structure) for structure in structures}
        if len(lengths) > 1:
            raise InvalidArgumentError(
                "Structures of the replicas differ: containers of lengths "
                f"{[len(structure) for structure in structures]}. Use the same "
                "structure on every replica."
            )
        mapped = [map_structure(fn, *items) for items in zip(*structures, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*mapped)
        return type(first)(mapped)
    if isinstance(first, Mapping):
        items = {
            key: map_structure(fn, *(structure[key] for structure in structures))
            for key in first
        }
        return rebuilt_mapping(first, items)
    return fn(*structures)


def rebuilt_mapping(original: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the kind of another one."""
    if type(original) is dict:
        return items
    if hasattr(original, "default_factory"):
        return type(original)(original.default_factory, items)
    return type(original)(items)


def flatten(structure: Any) -> list[Any]:
    """The leaves of a structure, in the order of `map_structure`."""
    leaves: list[Any] = []
    _collect(structure, leaves)
    return leaves


def _collect(structure: Any, leaves: list[Any]) -> None:
    if isinstance(structure, (list, tuple)):
        for part in structure:
            _collect(part, leaves)
    elif isinstance(structure, Mapping):
        for part in structure.values():
            _collect(part, leaves)
    else:
        leaves.append(structure)


def select_replica(replica_id: int, structure: Any) -> Any:
    """Replaces each `DistributedValues` of a structure by one component."""
    return map_structure(
        lambda leaf: (
            leaf.values[replica_id] if isinstance(leaf, DistributedValues) else leaf
        ),
        structure,
    )


def regroup(results: Sequence[Any]) -> Any:
    """Combines the replicas' results into one structure.

    Args:
        results: one structure per replica, all of the same form.

    Returns:
        The structure. A leaf is the object itself if it is identical on all replicas,
        else a `PerReplica`; with one replica, that replica's result.
    """
    if len(results) == 1:
        return results[0]

    def group(*leaves: Any) -> Any:
        if all(leaf is leaves[0] for leaf in leaves):
            return leaves[0]
        return PerReplica(leaves)

    return map_structure(group, *results)
