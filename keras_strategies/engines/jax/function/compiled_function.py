"""`ks.function` on JAX: a function as compiled programs with Keras state."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from keras_strategies import context, keras_compat
from keras_strategies.engines.jax.function.call_arguments import Packed
from keras_strategies.engines.jax.function.program_keys import Same
from keras_strategies.engines.jax.function.program_sharding import Layout
from keras_strategies.engines.jax.function.state_program import Program
from keras_strategies.engines.jax.function.trace_scopes import (
    AllReplicasNeededError,
    ProgramScope,
    in_trace,
    is_stacked,
)
from keras_strategies.engines.jax.function.worker_arguments import pack_with
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.values import DistributedValues, PerReplica, map_structure

# Programs that are kept for functions that are no longer called, at most.
MAX_PROGRAMS = 128


class CompiledFunction:
    """A function as programs with Keras state, one for each kind of arguments.

    Args:
        fn: the function.
        layout: gives the layout of a program for the strategies that were met while
            it was traced.
    """

    def __init__(self, fn: Callable[..., Any], layout: Callable[[Any], Layout]):
        self._fn = fn
        self._layout = layout
        self._calls: collections.OrderedDict[Any, _Call] = collections.OrderedDict()
        # By key, the workers that make the call together, once they are known.
        self._workers: dict[Any, JaxWorkers] = {}

    def __call__(self, args: Any, kwargs: dict[str, Any], key: Any = None) -> Any:
        structure = (list(args), kwargs)
        try:
            return self._call(structure, key, self._workers.get(key), False)
        except AllReplicasNeededError as needed:
            workers = needed.strategy.workers
            assert isinstance(workers, JaxWorkers)
            self._workers[key] = workers
        return self._call(structure, key, workers, False)

    def on_replicas(
        self, args: Any, kwargs: dict[str, Any], workers: JaxWorkers | None
    ) -> Any:
        """A call whose arguments are those of replicas, of the local ones here."""
        return self._call((list(args), kwargs), None, workers, workers is not None)

    def _call(
        self, structure: Any, key: Any, workers: JaxWorkers | None, own: bool
    ) -> Any:
        if workers is None:
            packed = Packed(structure)
        else:
            name = getattr(self._fn, "__qualname__", type(self._fn).__name__)
            packed = pack_with(workers, structure, name, own)
        key = (key, workers is None, packed.key)
        call = self._calls.get(key)
        if call is None:
            call = _Call(self._fn, packed, self._layout, workers)
            self._calls[key] = call
            if len(self._calls) > MAX_PROGRAMS:
                self._calls.popitem(last=False)
        return call(packed)


class _Call:
    """A function for arguments of one kind."""

    def __init__(
        self,
        fn: Callable[..., Any],
        packed: Packed,
        layout: Callable[[ProgramScope], Layout],
        workers: JaxWorkers | None,
    ):
        self._fn = fn
        self._packed = packed
        self._result: Any = None
        self._program = Program(self._flat, layout, workers)

    def __call__(self, packed: Packed) -> Any:
        self._packed = packed
        plain, joined = self._program(packed.plain, packed.parts)
        layout = self._program.layout

        def leaf(slot: _Slot) -> Any:
            if slot.kind == "static":
                return slot.value
            if slot.kind == "plain":
                return plain[slot.index]
            if slot.kind == "uneven":
                own = plain[slot.index : slot.index + slot.count]
                return _of_replicas(layout.own_shards(own))
            array = joined[slot.index]
            return _of_replicas(layout.part_shards(array, slot.count, slot.stacked))

        return map_structure(leaf, self._result)

    def _flat(self, plain: list[Any], joined: list[Any]) -> tuple[list[Any], list[Any]]:
        scope = keras_compat.current_stateless_scope()
        assert isinstance(scope, ProgramScope)
        args, kwargs = self._packed.build(plain, joined, scope.split)
        result = self._fn(*args, **kwargs)
        results: list[Any] = []
        split: list[Any] = []

        def place(leaf: Any) -> _Slot:
            if isinstance(leaf, jax.Array):
                results.append(leaf)
                return _Slot("plain", len(results) - 1)
            if not isinstance(leaf, DistributedValues) or not all(
                isinstance(part, jax.Array) for part in leaf.values
            ):
                return _Slot("static", value=leaf)
            parts, count = leaf.values, len(leaf.values)
            if len({(part.shape, part.dtype) for part in parts}) == 1:
                split.append(scope.joined(parts))
                return _Slot("parts", len(split) - 1, count, is_stacked(parts[0]))
            results.extend(parts)
            return _Slot("uneven", len(results) - count, count)

        self._result = map_structure(place, result)
        return results, split


def _of_replicas(values: Sequence[Any]) -> Any:
    # A worker's only replica has no wrapper.
    return PerReplica(values) if len(values) > 1 else values[0]


class _Slot:
    """Where a leaf of a program's result comes from."""

    def __init__(
        self,
        kind: str,
        index: int = 0,
        count: int = 0,
        stacked: bool = False,
        value: Any = None,
    ):
        self.kind = kind
        self.index = index
        self.count = count
        self.stacked = stacked
        self.value = value


def layout_of(scope: ProgramScope) -> Layout:
    """Where a program runs that uses these strategies and variables."""
    found = dict(scope.strategies)
    for cell in (*scope.reads.values(), *scope.written.values()):
        strategy = keras_compat.strategy_of(cell.variable)
        if strategy is not None:
            found.setdefault(id(strategy), strategy)
    for strategy in found.values():
        return strategy.trainer.layout  # type: ignore[attr-defined]
    return Layout()


def function(fn: Callable[..., Any], jit_compile: bool | None) -> Callable[..., Any]:
    """See `ks.function`."""
    if jit_compile is False:
        return fn
    compiled = CompiledFunction(fn, layout_of)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if in_trace():
            return fn(*args, **kwargs)
        return compiled(args, kwargs, Same(context.current_strategy()))

    return wrapped
