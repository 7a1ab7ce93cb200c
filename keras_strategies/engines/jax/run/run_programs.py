"""`Strategy.run` outside of `ks.function`: a trace in each call.

The Python of the function runs in every call, as on the other backends, and reads what
it finds there. Only the compiled program of a trace is reused, if a later trace is the
same program.
"""

from __future__ import annotations

import collections
import logging
import time
import types
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from keras_strategies.engines.jax.function.compiled_function import (
    MAX_PROGRAMS,
    CompiledFunction,
)
from keras_strategies.engines.jax.function.traced_executables import (
    TracedExecutables,
)
from keras_strategies.engines.jax.run.replica_program import ReplicaProgram, code_of
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.values import regroup, select_replica

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

_logger = logging.getLogger(__name__)

# Number of programs of one function at which a warning is issued.
_MANY_PROGRAMS = 32
# Number of calls of one function at which `ks.function` is recommended.
_MANY_CALLS = 20
_PACKAGE = __name__.partition(".")[0]


class RunPrograms:
    """Calls of `Strategy.run`, traced one by one.

    Args:
        strategy: the strategy.
        replica_program: the trace of its replicas.
    """

    def __init__(self, strategy: StrategyCore, replica_program: ReplicaProgram):
        self._strategy = strategy
        self._replica_program = replica_program
        self._executables = TracedExecutables()
        # By code: equal lambdas read the same state, with which their traces begin.
        self._functions: collections.OrderedDict[Any, CompiledFunction] = (
            collections.OrderedDict()
        )
        self._calls: collections.Counter[Any] = collections.Counter()
        self._compiled: collections.Counter[Any] = collections.Counter()

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        code = code_of(fn)
        compiled = self._functions.get(code)
        if compiled is None:
            compiled = CompiledFunction(fn, self._executables)
            self._functions[code] = compiled
            if len(self._functions) > MAX_PROGRAMS:
                self._functions.popitem(last=False)
        compiled.fn = self._traced(fn)
        own_args = regroup([list(own) for own in args])
        workers = self._strategy.workers
        assert workers is None or isinstance(workers, JaxCommunicator)
        own_kwargs = {"kwargs": regroup(list(kwargs))}
        before = self._executables.count
        start = time.perf_counter()
        result = compiled.on_replicas(own_args, own_kwargs, workers)
        seconds = time.perf_counter() - start
        self._count(fn, code, self._executables.count - before, seconds)
        return [select_replica(i, result) for i in range(len(args))]

    def _count(
        self, fn: Callable[..., Any], code: Any, programs: int, seconds: float
    ) -> None:
        """Says once what costs time: calls without `ks.function`, new programs."""
        module = getattr(fn, "__module__", None) or ""
        if module.partition(".")[0] == _PACKAGE:
            return  # Checks of this package, which the user cannot change.
        name = getattr(fn, "__qualname__", repr(fn))
        self._calls[code] += 1
        if self._calls[code] == _MANY_CALLS:
            _logger.warning(
                "`run` has been called %d times with %r outside of `ks.function`: its "
                "Python is traced in every call, which took %.1f ms in this one. In a "
                "`ks.function` the step around `run` is traced once.",
                _MANY_CALLS,
                name,
                1000 * seconds,
            )
        before = self._compiled[code]
        self._compiled[code] += programs
        is_many = before < _MANY_PROGRAMS <= self._compiled[code]
        if is_many and isinstance(code, types.CodeType):
            warnings.warn_explicit(
                f"`run` has compiled {name!r} {_MANY_PROGRAMS} times, because a value "
                "that it closes over was different each time: a number, an attribute, "
                "an array; or because it calls back to Python. Pass changing values as "
                "arguments, or hold them in a `keras.Variable`; draw random numbers "
                "from `keras.random` with a `SeedGenerator`.",
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
