"""`Strategy.run` outside of `ks.function`: a compiled program for each function."""

from __future__ import annotations

import collections
import types
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keras_strategies.engines.jax.function.compiled_function import (
    MAX_PROGRAMS,
    CompiledFunction,
)
from keras_strategies.engines.jax.function.program_keys import code_of, function_key
from keras_strategies.engines.jax.run.replica_program import ReplicaProgram
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.values import regroup, select_replica

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

# Number of programs of one function at which a warning is issued.
_MANY_PROGRAMS = 32


class RunPrograms:
    """Cache of `Strategy.run`'s programs; `program_keys` defines its keys.

    Args:
        strategy: the strategy.
        replica_program: the trace of its replicas.
    """

    def __init__(self, strategy: StrategyCore, replica_program: ReplicaProgram):
        self._strategy = strategy
        self._replica_program = replica_program
        self._made: collections.Counter[Any] = collections.Counter()
        self._compiled: collections.OrderedDict[Any, CompiledFunction] = (
            collections.OrderedDict()
        )

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        key = function_key(fn)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = CompiledFunction(self._traced(fn))
            self._compiled[key] = compiled
            if len(self._compiled) > MAX_PROGRAMS:
                self._compiled.popitem(last=False)
            self._count(fn)
        own_args = regroup([list(own) for own in args])
        workers = self._strategy.workers
        assert workers is None or isinstance(workers, JaxWorkers)
        own_kwargs = {"kwargs": regroup(list(kwargs))}
        result = compiled.on_replicas(own_args, own_kwargs, workers)
        return [select_replica(i, result) for i in range(len(args))]

    def _count(self, fn: Callable[..., Any]) -> None:
        code = code_of(fn)
        self._made[code] += 1
        if self._made[code] == _MANY_PROGRAMS and isinstance(code, types.CodeType):
            name = getattr(fn, "__qualname__", repr(fn))
            warnings.warn_explicit(
                f"`run` has compiled {name!r} {_MANY_PROGRAMS} times, because a value "
                "that it closes over was different each time: a number, an attribute, "
                "an array. Pass changing values as arguments, or hold them in a "
                "`keras.Variable`.",
                UserWarning,
                code.co_filename,
                code.co_firstlineno,
            )

    def _traced(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        replica_program = self._replica_program
        replicas = range(self._strategy.num_replicas_in_sync)

        def traced(*args: Any, kwargs: dict[str, Any]) -> Any:
            own_args = [tuple(select_replica(i, list(args))) for i in replicas]
            own_kwargs = [select_replica(i, kwargs) for i in replicas]
            return regroup(replica_program(fn, own_args, own_kwargs))

        return traced
