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
from keras_strategies.engines.jax.function.program_keys import (
    code_of,
    function_key,
    random_state,
)
from keras_strategies.engines.jax.run.replica_program import ReplicaProgram
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.values import regroup, select_replica

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

# Number of programs of one function at which a warning is issued.
_MANY_PROGRAMS = 32
# The same for programs that are not reused. Its first runs may create state.
_MANY_DROPPED = 4
_OTHER_VALUES = (
    "a value that it closes over was different each time: a number, an attribute, an "
    "array"
)


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
        self._dropped: collections.Counter[Any] = collections.Counter()
        # Whether traces of this call drew random numbers; None without a trace.
        self._drew: bool | None = None
        self._compiled: collections.OrderedDict[Any, CompiledFunction] = (
            collections.OrderedDict()
        )

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        key, _ = function_key(fn)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = CompiledFunction(self._traced(fn))
            self._compiled[key] = compiled
            if len(self._compiled) > MAX_PROGRAMS:
                self._compiled.popitem(last=False)
            self._count(fn, _MANY_PROGRAMS, self._made, _OTHER_VALUES)
        own_args = regroup([list(own) for own in args])
        workers = self._strategy.workers
        assert workers is None or isinstance(workers, JaxWorkers)
        own_kwargs = {"kwargs": regroup(list(kwargs))}
        self._drew = None
        try:
            result = compiled.on_replicas(own_args, own_kwargs, workers)
        finally:
            if self._drew is not None:
                self._drop_unless_constant(fn, key)
        return [select_replica(i, result) for i in range(len(args))]

    def _drop_unless_constant(self, fn: Callable[..., Any], key: Any) -> None:
        """Drops a program if the state behind its key has changed in its trace."""
        after, reason = function_key(fn)
        if self._drew:
            reason = "it draws random numbers from Python or NumPy"
        elif reason is None and after != key:
            reason = "it changes Python values that it reads"
        if reason is not None:
            self._compiled.pop(key, None)
            self._made[code_of(fn)] -= 1
            self._count(fn, _MANY_DROPPED, self._dropped, reason)

    def _count(
        self,
        fn: Callable[..., Any],
        many: int,
        counts: collections.Counter[Any],
        reason: str,
    ) -> None:
        code = code_of(fn)
        counts[code] += 1
        if counts[code] == many and isinstance(code, types.CodeType):
            name = getattr(fn, "__qualname__", repr(fn))
            warnings.warn_explicit(
                f"`run` has compiled {name!r} {many} times, because {reason}. "
                "Pass changing values as arguments, or hold them in a "
                "`keras.Variable`; draw random numbers from `keras.random` with a "
                "`SeedGenerator`.",
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
            before = random_state()
            result = replica_program(fn, own_args, own_kwargs)
            self._drew = bool(self._drew) or random_state() != before
            return regroup(result)

        return traced
