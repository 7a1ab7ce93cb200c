"""`ks.function` on JAX: a function as compiled programs with Keras state."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from keras_strategies.engines.jax.function.argument_keys import IdentityKey
from keras_strategies.engines.jax.function.call_arguments import (
    CallArguments,
    differ_in_rows,
)
from keras_strategies.engines.jax.function.compiled_program import CompiledProgram
from keras_strategies.engines.jax.function.program_sharding import ProgramSharding
from keras_strategies.engines.jax.function.refused_values import check_values
from keras_strategies.engines.jax.function.state_refs import ProgramDriver
from keras_strategies.engines.jax.function.trace_state import (
    AllReplicasNeededError,
    ProgramState,
    current_program,
    in_trace,
    is_stacked,
)
from keras_strategies.engines.jax.function.traced_executables import (
    TracedExecutables,
)
from keras_strategies.engines.jax.function.worker_arguments import gather_arguments
from keras_strategies.engines.jax.workers.jax_workers import JaxCommunicator
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.runtime import context
from keras_strategies.values import DistributedValues, PerReplica, map_structure

# Maximum number of programs in a cache; the oldest is dropped.
MAX_PROGRAMS = 128


class CompiledFunction:
    """A function compiled once for each structure, shapes and dtypes of arguments.

    Args:
        fn: the function.
        executables: where given, the function is traced in each call, and compiled
            programs are reused for equal traces.
    """

    def __init__(
        self, fn: Callable[..., Any], executables: TracedExecutables | None = None
    ):
        self.fn = fn
        self._executables = executables
        self._calls: collections.OrderedDict[Any, _Call] = collections.OrderedDict()
        # By key, the workers of a call; found by its first trace.
        self._workers: dict[Any, JaxCommunicator] = {}

    def __call__(self, args: Any, kwargs: dict[str, Any], key: Any = None) -> Any:
        structure = (list(args), kwargs)
        try:
            return self._call(structure, key, self._workers.get(key), False)
        except AllReplicasNeededError as needed:
            workers = needed.strategy.workers
            assert isinstance(workers, JaxCommunicator)
            self._workers[key] = workers
        return self._call(structure, key, workers, False)

    def on_replicas(
        self, args: Any, kwargs: dict[str, Any], workers: JaxCommunicator | None
    ) -> Any:
        """A call with the arguments of this worker's replicas."""
        return self._call((list(args), kwargs), None, workers, workers is not None)

    def _call(
        self, structure: Any, key: Any, workers: JaxCommunicator | None, own: bool
    ) -> Any:
        check_values(structure)
        if workers is None:
            packed = CallArguments(structure)
        else:
            name = getattr(self.fn, "__qualname__", type(self.fn).__name__)
            packed = gather_arguments(workers, structure, name, own)
        key = (key, workers is None, packed.key)
        call = self._calls.get(key)
        if call is None:
            call = _Call(packed, workers, self._executables)
            self._calls[key] = call
            if len(self._calls) > MAX_PROGRAMS:
                self._calls.popitem(last=False)
        return call(self.fn, packed)


class _Call:
    """A function compiled for one key of arguments."""

    def __init__(
        self,
        packed: CallArguments,
        workers: JaxCommunicator | None,
        executables: TracedExecutables | None,
    ):
        self._fn: Callable[..., Any] | None = None
        self._packed = packed
        self._result: Any = None
        self._program = CompiledProgram(
            self._flat, sharding_of_program, workers, executables
        )

    def __call__(self, fn: Callable[..., Any], packed: CallArguments) -> Any:
        self._fn, self._packed = fn, packed
        plain, joined = self._program(packed.plain, packed.parts)
        sharding = self._program.sharding
        return map_structure(lambda leaf: leaf(plain, joined, sharding), self._result)

    def _flat(self, plain: list[Any], joined: list[Any]) -> tuple[list[Any], list[Any]]:
        program = current_program()
        assert program is not None and self._fn is not None
        args, kwargs = self._packed.build(plain, joined, program)
        result = self._fn(*args, **kwargs)
        check_values(result)
        results: list[Any] = []
        split: list[Any] = []

        def place(leaf: Any) -> _ResultLeaf:
            if isinstance(leaf, jax.Array):
                index = len(results)
                results.append(leaf)
                return lambda plain, *_: plain[index]
            if not isinstance(leaf, DistributedValues) or not all(
                isinstance(part, jax.Array) for part in leaf.values
            ):
                return lambda *_: leaf
            parts = leaf.values
            are_equal = len({(part.shape, part.dtype) for part in parts}) == 1
            if are_equal or differ_in_rows(parts):
                index, count = len(split), len(parts)
                split.append(program.joined(parts))
                stacked = are_equal and is_stacked(parts[0])
                rows = None if are_equal else [part.shape[0] for part in parts]
                return lambda _, joined, sharding: _per_replica(
                    sharding.part_shards(joined[index], count, stacked, rows)
                )
            own = slice(len(results), len(results) + len(parts))
            results.extend(parts)
            return lambda plain, _, sharding: _per_replica(
                sharding.own_shards(plain[own])
            )

        self._result = map_structure(place, result)
        return results, split


# A leaf of a result, of the program's plain and joined results and its shardings.
_ResultLeaf = Callable[[list[Any], list[Any], ProgramSharding], Any]


def _per_replica(values: Sequence[Any]) -> Any:
    # With a single local replica, the value itself.
    return PerReplica(values) if len(values) > 1 else values[0]


def sharding_of_program(program: ProgramState) -> ProgramSharding:
    """Shardings for the first strategy of a trace or of its variables."""
    refs = (*program.reads.values(), *program.written.values())
    of_variables = (strategy_of(ref.variable) for ref in refs)
    for strategy in (*program.strategies.values(), *of_variables):
        if strategy is not None:
            driver = strategy.drivers.run
            assert isinstance(driver, ProgramDriver)
            return driver.program_sharding
    return ProgramSharding()


def function(fn: Callable[..., Any], jit_compile: bool | None) -> Callable[..., Any]:
    """See `ks.function`."""
    if jit_compile is False:
        return fn
    compiled = CompiledFunction(fn)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if in_trace():
            return fn(*args, **kwargs)
        return compiled(args, kwargs, IdentityKey(context.current_strategy()))

    return wrapped
