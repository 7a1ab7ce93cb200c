"""Enumerations and options, frozen and validated at construction."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, TypeVar

from keras_strategies.errors import InvalidArgumentError, InvalidTypeError

_Options = TypeVar("_Options")


def check_flag(name: str, value: object) -> None:
    """Raises `TypeError` for a flag that is not a bool."""
    if not isinstance(value, bool):
        raise InvalidTypeError(
            f"`{name}` must be True or False. Received: {value!r} of type "
            f"{type(value).__name__}"
        )


def check_count(
    name: str, value: object, least: int, kind: str = "an int of", end: str = ""
) -> None:
    """Raises `ValueError` for a number that is not an int of `least` or more.

    Args:
        name: str, the argument.
        value: its value.
        least: int.
        kind: str, what it has to be, before `least` in the message.
        end: str, what else it may be.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(
            f"`{name}` must be {kind} {least} or more{end}. Received: {name}={value!r}"
        )


def check_seconds(name: str, value: Any, end: str = "") -> None:
    """Raises `ValueError` for a time that is not above 0; see `check_count`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (is_number and value > 0):
        raise InvalidArgumentError(
            f"`{name}` must be a number of seconds above 0{end}. Received: "
            f"{name}={value!r}"
        )


def check_random_numbers(value: object) -> None:
    """Raises an error for other random numbers of rows than the known ones."""
    if value not in ("partitioned", "keras"):
        raise InvalidArgumentError(
            "`random_numbers` must be 'partitioned' (drawn in blocks of rows on Torch) "
            f"or 'keras' (those of Keras without a strategy). Received: {value!r}"
        )


def _parsed_fields(
    cls: type[_Options], value: Any, what: str, error: type[Exception]
) -> _Options:
    """Options from an argument: None, an instance, or one of tf.distribute's class.

    tf.distribute's classes have the same fields.
    """
    if value is None:
        return cls()
    if isinstance(value, cls):
        return value
    names = list(cls.__dataclass_fields__)  # type: ignore[attr-defined]
    if not isinstance(value, type) and all(hasattr(value, name) for name in names):
        return cls(**{name: getattr(value, name) for name in names})
    raise error(
        f"`{what}` must be a ks.{cls.__name__}. Received: {value!r} of type "
        f"{type(value).__name__}"
    )


class _Named:
    """Makes an enumeration accept its members' names in any case."""

    @classmethod
    def parse(cls: Any, value: object) -> Any:
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


class _NamedEnum(_Named, enum.Enum):
    pass


class ReduceOp(_NamedEnum):
    """Reduction over replicas."""

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"


class VariableAggregation(_Named, enum.StrEnum):
    """Aggregation of the values that replicas assign to one variable.

    Members are strings, as Keras expects.

    Example:

    >>> keras.Variable(0.0, aggregation=ks.VariableAggregation.SUM)
    """

    NONE = "none"
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class VariableSynchronization(_Named, enum.StrEnum):
    """Synchronization of the copies of a variable; members are strings.

    Example:

    >>> keras.Variable(
    ...     0.0, synchronization=ks.VariableSynchronization.ON_READ, aggregation="sum")
    """

    AUTO = "auto"
    NONE = "none"
    ON_WRITE = "on_write"
    ON_READ = "on_read"


class CommunicationImplementation(_NamedEnum):
    """The engine that carries collectives between processes."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


class InputReplicationMode(_NamedEnum):
    """How many input pipelines `distribute_datasets_from_function` makes."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(_NamedEnum):
    """Division of one dataset between workers; one worker reads all of it.

    - `AUTO`: by `FILE` where a `tf.data` dataset reads at least as many files as
      there are workers, otherwise by `DATA`.
    - `FILE`: each worker reads separate files.
    - `DATA`: each worker takes its rows of every global batch, so that N workers
      compute what one computes. Arrays, `PyDataset` and map-style loaders always do.
    - `HINT`: `tf.data.Dataset.shard(tf.data.experimental.SHARD_HINT, ...)` in the
      pipeline says where.
    - `OFF`: every worker reads the full dataset; its batches are its part of the
      global batches.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@dataclass(frozen=True)
class CommunicationOptions:
    """Implementation of collectives between devices and workers.

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
        check_count("bytes_per_pack", self.bytes_per_pack, 0, "a number of bytes,")
        if self.timeout_seconds is not None:
            check_seconds("timeout_seconds", self.timeout_seconds, ", or None")
        implementation = CommunicationImplementation.parse(self.implementation)
        object.__setattr__(self, "implementation", implementation)

    @classmethod
    def parse(cls, value: Any, what: str = "options") -> CommunicationOptions:
        """Options from an argument: None for the defaults, or those of tf.distribute.

        Raises:
            ValueError: for anything else.
        """
        return _parsed_fields(cls, value, what, InvalidArgumentError)


@dataclass(frozen=True)
class Elastic:
    """Changes of the number of workers during training.

    Args:
        min_workers: int, at least 1. With fewer workers, training waits for others.
        max_workers: int or None, the largest number of workers that train together;
            others wait as spares. None for all workers of the cluster.
        rejoin: bool, whether workers may join after the start: new ones, and those that
            were lost.
        timeout_seconds: float, seconds to wait for `min_workers`, and for workers that
            are busy with a step when others form a new group.

    Raises:
        ValueError: for numbers below 1, or a maximum below the minimum.

    Example:

    >>> elastic = Elastic(min_workers=2, timeout_seconds=60)
    """

    min_workers: int = 1
    max_workers: int | None = None
    rejoin: bool = True
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        check_count("min_workers", self.min_workers, 1, "a number of workers,")
        if self.max_workers is not None:
            kind = "a number of workers, `min_workers`,"
            check_count("max_workers", self.max_workers, self.min_workers, kind)
        check_flag("rejoin", self.rejoin)
        check_seconds("timeout_seconds", self.timeout_seconds)

    @classmethod
    def check(cls, value: Any) -> None:
        """Raises `TypeError` if `elastic` is neither an `Elastic` nor None."""
        if value is not None and not isinstance(value, cls):
            raise InvalidTypeError(
                "`elastic` must be a ks.Elastic or None. Received: "
                f"{value!r} of type {type(value).__name__}"
            )


@dataclass(frozen=True)
class RunOptions:
    """Options of `Strategy.run`.

    Args:
        experimental_enable_dynamic_batch_size: bool, whether replicas may get arrays
            of different shapes, as in an uneven last batch. False makes that a
            `ValueError`, for functions that are only right for one static shape.
        experimental_bucketizing_dynamic_shape: bool, must be False. Inputs are never
            padded to a bucket size, since results would depend on the padding; pad
            them in the input pipeline.
        experimental_xla_options: must be None. Options of XLA are set for the process,
            by the environment variable XLA_FLAGS; variables are sharded by
            `ks.ModelParallelStrategy`.

    Raises:
        TypeError: for a flag that is not a bool.
        ValueError: for a setting that is not supported.

    Example:

    >>> options = ks.RunOptions(experimental_enable_dynamic_batch_size=False)
    >>> strategy.run(train_step, args=(batch,), options=options)
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None

    def __post_init__(self) -> None:
        for name in (
            "experimental_enable_dynamic_batch_size",
            "experimental_bucketizing_dynamic_shape",
        ):
            check_flag(name, getattr(self, name))
        if self.experimental_bucketizing_dynamic_shape:
            raise InvalidArgumentError(
                "`experimental_bucketizing_dynamic_shape=True` is not supported: "
                "inputs are never padded, since results would depend on the "
                "padding. Pad them in the input pipeline and omit this option."
            )
        if self.experimental_xla_options is not None:
            raise InvalidArgumentError(
                "`experimental_xla_options` is not supported. Set XLA's options for "
                "the process, with the environment variable XLA_FLAGS; to shard "
                "variables use ks.ModelParallelStrategy. "
                f"Received: {self.experimental_xla_options!r}"
            )

    @classmethod
    def parse(cls, value: Any, what: str = "options") -> RunOptions:
        """Options from an argument: None for the defaults, or those of tf.distribute.

        Raises:
            TypeError: for anything else.
        """
        return _parsed_fields(cls, value, what, InvalidTypeError)


@dataclass(frozen=True)
class InputOptions:
    """Options of distributed datasets: replication, transfer and prefetch.

    Args:
        experimental_fetch_to_device: bool or None, whether batches are moved to the
            replicas' devices; None for True. False leaves them on the host.
        experimental_replication_mode: an `InputReplicationMode` or its name. With
            `PER_REPLICA`, `distribute_datasets_from_function` calls its function once
            for each replica.
        experimental_place_dataset_on_device: False; datasets are on the host, and
            their batches are moved to the devices.
        experimental_per_replica_buffer_size: int, batches that are prefetched; 0
            moves each batch when it is used.

    Raises:
        TypeError: for a flag that is not a bool.
        ValueError: for a negative size, or a dataset placed on a device.

    Example:

    >>> ks.InputOptions(experimental_per_replica_buffer_size=2)
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode | str = (
        InputReplicationMode.PER_WORKER
    )
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        mode = InputReplicationMode.parse(self.experimental_replication_mode)
        object.__setattr__(self, "experimental_replication_mode", mode)
        fetch = self.experimental_fetch_to_device
        fetch = True if fetch is None else fetch
        check_flag("experimental_fetch_to_device", fetch)
        object.__setattr__(self, "experimental_fetch_to_device", fetch)
        size = "experimental_per_replica_buffer_size"
        check_count(size, getattr(self, size), 0, "a number of batches,")
        if self.experimental_place_dataset_on_device is not False:
            raise InvalidArgumentError(
                "`experimental_place_dataset_on_device` must be False: datasets are on "
                "the host, and their batches are moved to the devices, as by "
                "`experimental_fetch_to_device=True`. Received: "
                f"{self.experimental_place_dataset_on_device!r}"
            )

    @classmethod
    def parse(
        cls,
        value: Any,
        what: str = "options",
        error: type[Exception] = InvalidArgumentError,
    ) -> InputOptions:
        """Options from an argument: None for the defaults, or those of tf.distribute.

        Raises:
            ValueError: for anything else, or `error`.
        """
        return _parsed_fields(cls, value, what, error)


@dataclass(frozen=True)
class InputContext:
    """The input pipeline that a dataset function makes.

    Args:
        num_input_pipelines: int, how many pipelines there are, one for each worker.
        input_pipeline_id: int, the number of this one, from 0.
        num_replicas_in_sync: int, how many replicas compute one step together.

    Raises:
        ValueError: for numbers out of range.

    Example:

    >>> def dataset_fn(context):
    ...     batch_size = context.get_per_replica_batch_size(64)
    ...     dataset = dataset.shard(
    ...         context.num_input_pipelines, context.input_pipeline_id)
    ...     return dataset.batch(batch_size)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if (
            self.num_input_pipelines < 1
            or self.num_replicas_in_sync < 1
            or not 0 <= self.input_pipeline_id < self.num_input_pipelines
        ):
            raise InvalidArgumentError(
                "The numbers of pipelines and replicas must be 1 or more, and "
                "`input_pipeline_id` between 0 and the number of pipelines - 1. "
                f"Received: {self!r}"
            )

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of one replica's batch.

        Args:
            global_batch_size: int, rows of the global batch.

        Returns:
            int.

        Raises:
            ValueError: if the replicas cannot have equal batches.

        >>> InputContext(num_replicas_in_sync=6).get_per_replica_batch_size(12)
        2
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise InvalidArgumentError(
                f"A global batch of {global_batch_size} rows cannot be divided evenly "
                f"by {self.num_replicas_in_sync} replicas. Use a multiple of the "
                "number of replicas, or `strategy.experimental_distribute_dataset`, "
                "which splits batches of any size."
            )
        return size
