"""Gradients and compiled steps of portable loops, on TensorFlow."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.communication.joined_workers import joined_workers
from keras_strategies.engines.tensorflow.workers.worker_collectives import (
    TensorFlowCommunicator,
)
from keras_strategies.errors import ReplicaError
from keras_strategies.keras_compat.thread_state import current_stateless_scope
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.user_warnings import warn_user


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
) -> Callable[..., Any]:
    """See `ks.value_and_grad`."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # Read before the call: the function may assign the variables.
        trainable = [variable.trainable for variable in variables]
        sources = [_source(v) for v in itertools.compress(variables, trainable)]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            result = fn(*args, **kwargs)
        loss = result[0] if has_aux else result
        found = iter(tape.gradient(loss, sources))
        gradients = [next(found) if trains else None for trains in trainable]
        return ((loss, result[1]) if has_aux else loss), gradients

    return wrapped


def _source(variable: Any) -> Any:
    """The tensor to differentiate by: the variable itself, or its replica's value."""
    if isinstance(variable, tf.Variable):
        return variable
    scope = current_stateless_scope()
    value = None if scope is None else scope.get_current_value(variable)
    return raw_value(variable) if value is None else value


class _Compiling(threading.local):
    # Whether this thread traces a program for XLA, and whether that trace was refused.
    xla = False
    refused = False


_compiling = _Compiling()


class XlaRefusedError(ReplicaError):
    """Replicas on several devices were traced in a program for XLA.

    Internal: `function` catches it and calls the function without XLA.
    """


def refuse_xla() -> None:
    """Ends the trace of an XLA program; called before several replicas are traced."""
    if _compiling.xla:
        _compiling.refused = True
        raise XlaRefusedError("XLA compiles programs for one device.")


def function(fn: Callable[..., Any], jit_compile: bool | None) -> Callable[..., Any]:
    """See `ks.function`."""
    plain = tf.function(fn, reduce_retracing=True)
    workers = joined_workers()
    if isinstance(workers, TensorFlowCommunicator):
        plain = _watched(plain, workers)
    if not jit_compile:
        return plain
    with_xla = tf.function(fn, reduce_retracing=True, jit_compile=True)
    has_replicas = False

    @functools.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_replicas
        if has_replicas:
            return plain(*args, **kwargs)
        # Only the trace shows whether the function runs several replicas.
        before = _compiling.xla
        _compiling.xla, _compiling.refused = True, False
        try:
            return with_xla(*args, **kwargs)
        except Exception:
            if not _compiling.refused:
                raise
        finally:
            _compiling.xla = before
        has_replicas = True
        warn_user(
            "`ks.function(..., jit_compile=True)` was called with a function that "
            "runs several replicas. On TensorFlow, XLA compiles programs for one "
            "device only, so the function runs without XLA; its results are the same "
            "but for random numbers, which XLA draws otherwise. Use "
            "ks.OneDeviceStrategy for an XLA program."
        )
        return plain(*args, **kwargs)

    return step


def _watched(program: Any, workers: TensorFlowCommunicator) -> Callable[..., Any]:
    """A program that raises `WorkerError` if it fails because a worker was lost."""

    @functools.wraps(program.python_function)
    def step(*args: Any, **kwargs: Any) -> Any:
        with workers.watched():
            return program(*args, **kwargs)

    step.program = program  # type: ignore[attr-defined]
    return step


def program_of(fn: Any) -> Any:
    """The `tf.function` behind a result of `function`; other functions unchanged."""
    return getattr(fn, "program", fn)
