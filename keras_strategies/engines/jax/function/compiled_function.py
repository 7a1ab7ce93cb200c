"""`ks.function` and `ks.value_and_grad` on JAX."""

from __future__ import annotations

import collections
import functools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras
from jax import numpy as jnp

from keras_strategies import context, keras_compat
from keras_strategies.engines.jax import jax_compat
from keras_strategies.engines.jax.function.call_arguments import Packed
from keras_strategies.engines.jax.function.program_keys import (
    Same,
    code_of,
    function_key,
)
from keras_strategies.engines.jax.function.program_sharding import Layout
from keras_strategies.engines.jax.function.state_program import Program
from keras_strategies.engines.jax.function.trace_scopes import (
    AllReplicasNeededError,
    Given,
    ProgramScope,
    TraceScope,
    check_sees_all,
    is_stacked,
)
from keras_strategies.engines.jax.function.worker_arguments import pack_with
from keras_strategies.engines.jax.run.replica_scope import ReplicaScope
from keras_strategies.engines.jax.workers.jax_workers import JaxWorkers
from keras_strategies.runtime.run_scope import RunScope
from keras_strategies.values import (
    DistributedValues,
    PerReplica,
    map_structure,
    regroup,
    select_replica,
)

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy

# Programs that are kept for functions that are no longer called, at most.
_MAX_PROGRAMS = 128
# Programs of one function, after which something seems to be wrong.
_MANY_PROGRAMS = 32


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
            if len(self._calls) > _MAX_PROGRAMS:
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


class RunPrograms:
    """`Strategy.run` outside of `ks.function`: a program for each function.

    What else makes two calls different is said in `closures`.
    """

    def __init__(self, strategy: Strategy):
        self._strategy = strategy
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
            compiled = CompiledFunction(self._traced(fn), layout_of)
            self._compiled[key] = compiled
            if len(self._compiled) > _MAX_PROGRAMS:
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
                f"`run` has compiled {name!r} {_MANY_PROGRAMS} times, because what it "
                "closes over was another thing each time: a number, an attribute, an "
                "array. Pass what changes as an argument, or keep it in a "
                "`keras.Variable`.",
                UserWarning,
                code.co_filename,
                code.co_firstlineno,
            )

    def _traced(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        run = self._strategy.trainer.run  # type: ignore[attr-defined]
        replicas = range(self._strategy.num_replicas_in_sync)

        def traced(*args: Any, kwargs: dict[str, Any]) -> Any:
            own_args = [tuple(select_replica(i, list(args))) for i in replicas]
            own_kwargs = [select_replica(i, kwargs) for i in replicas]
            return regroup(run(fn, own_args, own_kwargs))

        return traced


def in_trace() -> bool:
    """Whether this thread is tracing, so that there is nothing to compile."""
    scope = keras_compat.current_stateless_scope()
    return scope is not None or jax_compat.is_tracing()


def sees_all_replicas(strategy: Strategy) -> bool:
    """Whether a program is traced that has the values of all of its replicas."""
    scope = keras_compat.current_stateless_scope()
    root = scope.root if isinstance(scope, TraceScope) else None
    if root is None:
        return False
    check_sees_all(root, strategy)
    return True


def initial_value(value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
    """An initializer for a value; in a program, variables get theirs after the trace.

    Keras refuses values there. One that is computed in the program is left to it.
    """
    scope = keras_compat.current_stateless_scope()
    if not isinstance(scope, (TraceScope, RunScope)):
        return value, shape, dtype
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
        return value, shape, dtype
    found = jax.eval_shape(lambda: keras.ops.convert_to_tensor(value, dtype))

    def initializer(shape: Any, dtype: Any = None) -> Any:
        return keras.ops.convert_to_tensor(value, dtype)

    return initializer, found.shape, found.dtype.name


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


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool
) -> Callable[..., Any]:
    """See `ks.value_and_grad`."""
    wanted = [
        v for v in variables if v.trainable and keras.backend.is_float_dtype(v.dtype)
    ]

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        outer = keras_compat.current_stateless_scope()
        call = _Differentiated(outer, lambda: fn(*args, **kwargs), wanted, has_aux)
        loss, aux, found = call()
        gradients = [found.get(id(variable)) for variable in variables]
        return ((loss, aux) if has_aux else loss), gradients

    return wrapped


class _Differentiated:
    """One call of a function, as a pure one of the values of variables."""

    def __init__(
        self,
        outer: Any,
        fn: Callable[[], Any],
        variables: Sequence[Any],
        has_aux: bool,
    ):
        self._outer = outer
        self._fn = fn
        self._variables = list({id(v): v for v in variables}.values())
        self._has_aux = has_aux
        self._scope: Any = None
        self._given = Given()
        self._aux: Any = None

    def __call__(self) -> tuple[Any, Any, dict[int, Any]]:
        outer = self._outer
        values = [self._value(variable) for variable in self._variables]
        if isinstance(outer, ReplicaScope):
            results = outer.replicas.value_and_grad(self._pure, values)
        else:
            results = jax.value_and_grad(self._pure, has_aux=True)(values)
        (_, (loss, arrays, updates)), gradients = results
        if isinstance(outer, ReplicaScope):
            outer.take_over(self._scope, updates)
        else:
            self._scope.commit(updates)
        rest = iter(arrays)
        aux = map_structure(
            lambda slot: next(rest) if slot.kind == "plain" else slot.value, self._aux
        )
        ids = [id(variable) for variable in self._variables]
        found = {
            key: gradient
            for key, gradient in zip(ids, gradients, strict=True)
            if key in self._given.read
        }
        return loss, aux, found

    def _value(self, variable: Any) -> Any:
        if self._outer is not None:
            value = self._outer.get_current_value(variable)
            if value is not None:
                return value
        if keras_compat.raw_value(variable) is None:
            # Made in this trace; it has the initializer's value until the next one.
            return jnp.asarray(variable.value, variable.dtype)
        return jnp.asarray(keras_compat.raw_value(variable))

    def _pure(self, values: list[Any]) -> Any:
        outer = self._outer
        self._given = given = Given(self._variables, values)
        if isinstance(outer, ReplicaScope):
            self._scope = inner = outer.nested(given)
        else:
            self._scope = inner = TraceScope(outer, given)
        with inner:
            result = self._fn()
        loss, aux = result if self._has_aux else (result, None)
        loss = jnp.asarray(loss)
        arrays: list[Any] = []

        def place(leaf: Any) -> _Slot:
            if isinstance(leaf, jax.Array):
                arrays.append(leaf)
                return _Slot("plain")
            return _Slot("static", value=leaf)

        self._aux = map_structure(place, aux)
        return loss, (loss, arrays, inner.updated_values())
