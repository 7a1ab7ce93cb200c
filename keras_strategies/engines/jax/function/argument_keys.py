"""Keys of arguments that are constants of a compiled function."""

from __future__ import annotations

from typing import Any

SCALARS = (int, float, complex, bool, str, bytes, type(None))


class IdentityKey:
    """Key of an object by identity; holds the object, so that its `id` stays unique."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdentityKey) and other.value is self.value


def static_key(value: Any) -> Any:
    """Key of a constant: by value for scalars, by identity for other objects."""
    if isinstance(value, SCALARS):
        # 0.0 == -0.0, of which a program computes other numbers.
        exact = value and not isinstance(value, complex)
        return (type(value), value if exact else repr(value))
    return IdentityKey(value)
