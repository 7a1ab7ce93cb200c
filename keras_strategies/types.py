"""Enumerations and options: frozen, and validated when they are made."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from keras_strategies.errors import InvalidArgumentError


class _NamedEnum(enum.Enum):
    """An enumeration that also accepts its members' names in any case."""

    @classmethod
    def parse(cls, value: object) -> _NamedEnum:
        if isinstance(value, cls):
            return value
        # tf.distribute's own enumerations have the same member names.
        name = value if isinstance(value, str) else getattr(value, "name", None)
        for member in cls:
            if isinstance(name, str) and member.name == name.upper():
                return member
        known = ", ".join(repr(member.name) for member in cls)
        raise InvalidArgumentError(
            f"{value!r} is not a {cls.__name__}. Use one of {known} "
            f"(in any case) or a member of ks.{cls.__name__}."
        )


class ReduceOp(_NamedEnum):
    """How the values of several replicas become one."""

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"


class VariableAggregation(_NamedEnum):
    """How the values that replicas assign to one variable are combined."""

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class VariableSynchronization(_NamedEnum):
    """When the copies of one variable are brought together."""

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class CommunicationImplementation(_NamedEnum):
    """The engine that carries collectives between processes."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """How collectives between devices and workers are carried out.

    Args:
        bytes_per_pack: int, bytes. Tensors are reduced in packs of about this
            size; 0 leaves the size to the backend.
        timeout_seconds: float or None, seconds. How long a collective waits for
            the other workers before it raises; None leaves it to the backend.
        implementation: a `CommunicationImplementation` or its name.

    Raises:
        ValueError: for a negative size or a timeout that is not positive.

    Example:

    >>> ks.CommunicationOptions(bytes_per_pack=32 * 2**20, timeout_seconds=60)
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if not isinstance(self.bytes_per_pack, int) or self.bytes_per_pack < 0:
            raise InvalidArgumentError(
                "`bytes_per_pack` is a number of bytes, 0 or more. "
                f"Received: bytes_per_pack={self.bytes_per_pack!r}"
            )
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise InvalidArgumentError(
                "`timeout_seconds` is a number of seconds above 0, or None. "
                f"Received: timeout_seconds={self.timeout_seconds!r}"
            )
        implementation = CommunicationImplementation.parse(self.implementation)
        object.__setattr__(self, "implementation", implementation)
