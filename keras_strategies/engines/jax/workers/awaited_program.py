"""Programs of elastic workers: the loss of a worker ends an execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator


class AwaitedProgram:
    """Executes a function of `jax.jit`, and waits for its results.

    Both may wait for other workers: JAX executes small programs on CPUs within the
    call. So they run on a thread that is left after a loss, as `service_waits` says.
    The function is traced and compiled on the thread of the caller, which has the
    scopes of Keras and the settings of JAX that a trace reads.

    Args:
        workers: the communicator between the workers.
        program: the function of `jax.jit`; it donates nothing.
    """

    def __init__(self, workers: JaxCommunicator, program: Any):
        self._workers = workers
        self._program = program
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        key = structure, *map(_signature, leaves)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._program.lower(*args).compile()
        return self._workers.executed(compiled, *args)


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype, leaf.sharding
    return jax.typeof(leaf)
