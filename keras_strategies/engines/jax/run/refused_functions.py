"""Errors for functions whose replicas cannot be one program over their devices."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from keras_strategies.engines.jax.function.call_arguments import ReplicaArguments
from keras_strategies.errors import ReplicaMismatchError
from keras_strategies.user_warnings import line_of_error


class NotUniformError(Exception):
    """The function cannot be one program with its replicas on their own devices."""


class NumberNeededError(Exception):
    """Python in the function needs the number of the replica.

    Args:
        error: JAX's error.
    """

    def __init__(self, error: Exception):
        super().__init__(error)
        self.error = error


def needs_a_value(error: Exception) -> bool:
    """Whether Python needs the value of a tensor.

    As a shape or the key of a dict, it ends with a `TypeError` of JAX or Python.
    """
    kinds = (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.NonConcreteBooleanIndexError,
    )
    is_of_tracer = isinstance(error, TypeError) and "Tracer" in str(error)
    return is_of_tracer or isinstance(error, kinds)


def of_replica_number(
    fn: Callable[..., Any], error: BaseException
) -> ReplicaMismatchError:
    """That Python needs the number of the replica."""
    return ReplicaMismatchError(
        f"Python in {_place(fn, error)} depends on the replica: its number, "
        "`replica_id_in_sync_group`, is a tensor in the one program that all replicas "
        "are on JAX. Use `keras.ops.where` or `keras.ops.cond` in place of Python's "
        "`if`, and `keras.ops.take` in place of an index into a list; or pass what "
        "differs as an argument (`experimental_distribute_values_from_function`). "
        f"JAX's error: {_first_line(error)}"
    )


def of_replicas(
    fn: Callable[..., Any], arguments: ReplicaArguments, error: NotUniformError
) -> ReplicaMismatchError:
    """That replicas do what devices with programs of their own cannot do."""
    # Keras adds the names of layers to a copy of the error.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NotUniformError):
            error = cause
        cause = cause.__context__
    place = _place(fn, error)
    if arguments.is_uniform:
        return ReplicaMismatchError(
            f"The replicas of {place} cannot be one program, as on JAX they have to "
            f"be: {error}. Use values that are tensors of one shape on all replicas."
        )
    rows = next(
        [part.shape[0] for part in own]
        for own in arguments.parts
        if len({part.shape for part in own}) > 1
    )
    return ReplicaMismatchError(
        f"The replicas of {place} have {', '.join(map(str, rows))} rows, and {error}. "
        "On JAX replicas with different numbers of rows exchange nothing but the "
        "gradients of one `optimizer.apply`, at the end. Use batches that "
        f"{len(rows)} replicas divide: leave out a last one that they do not, as with "
        "`batch(size, drop_remainder=True)`, or pad it with rows of weight 0, which "
        "count in batch normalization. `fit` takes batches of any size."
    )


def of_arguments(
    fn: Callable[..., Any], arguments: ReplicaArguments
) -> ReplicaMismatchError:
    """That arguments differ in more than their rows."""
    return ReplicaMismatchError(
        f"The replicas of {_place(fn)} get arguments that differ in more than their "
        f"number of rows: {arguments.difference}. On JAX all replicas are one program. "
        "Pass tensors of one dtype, and of one shape but for the rows, in equal "
        "structures, and Python values that are the same on all replicas."
    )


def _place(fn: Callable[..., Any], error: BaseException | None = None) -> str:
    """The name of a function, and the line of an error or the function's first one."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = repr(getattr(fn, "__qualname__", type(fn).__name__))
    line = None if error is None else line_of_error(error)
    code = getattr(fn, "__code__", None)
    if line is None and code is not None:
        line = f"{code.co_filename}:{code.co_firstlineno}"
    return name if line is None else f"{name} ({line})"


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
