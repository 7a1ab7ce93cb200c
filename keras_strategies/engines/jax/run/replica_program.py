"""`Strategy.run` on JAX: replicas are one program over a mesh.

# Two ways to trace replicas

*Sharded.* `jax.shard_map` over the replicas' devices: the function is traced once, and
each device runs its own part. The replica's number is a traced scalar there.

*Side by side.* Where replicas have different shapes, as in an uneven last batch, or
where the function's Python depends on the replica's number, the function is traced
once for each replica, all of them into one program. Every device computes the whole of
it then: right in every case, but no faster than one device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from keras_strategies import context, keras_compat
from keras_strategies.engines.jax.devices import jax_device
from keras_strategies.engines.jax.function.call_arguments import Columns
from keras_strategies.engines.jax.function.program_keys import function_key
from keras_strategies.engines.jax.function.program_sharding import Layout
from keras_strategies.engines.jax.function.state_refs import Cell, LocalStacks
from keras_strategies.engines.jax.function.trace_scopes import (
    MAX_TRACES,
    ProgramScope,
    TraceScope,
    check_sees_all,
)
from keras_strategies.engines.jax.run.replica_scope import MergeScope
from keras_strategies.engines.jax.run.shard_map_replicas import Sharded
from keras_strategies.engines.jax.run.unrolled_replicas import SideBySide
from keras_strategies.errors import ContextError
from keras_strategies.runtime.single_replica import SingleReplica

if TYPE_CHECKING:
    from keras_strategies.strategies.base import Strategy


REPLICA_AXIS = "replica"


class JaxRun:
    """Runs functions on the replicas of one strategy.

    A program is about the replicas of all workers, whose devices are those of its
    mesh; what goes in and comes out is that of the local ones.

    Args:
        strategy: the strategy.
        devices: the devices of all replicas.
        mesh: a mesh whose first axis has the replicas; None for one that has no
            other. Along the others XLA cuts what a replica computes, by the
            variables' layouts.
        own: gives the sharding that a variable has; None where all are whole.
    """

    def __init__(
        self,
        strategy: Strategy,
        devices: Sequence[jax.Device],
        mesh: jax.sharding.Mesh | None = None,
        own: Callable[[Any], jax.sharding.Sharding] | None = None,
    ):
        self.strategy = strategy
        placement = strategy.placement
        self.count = len(devices)
        if mesh is None:
            mesh = jax.sharding.Mesh(np.array(devices), (REPLICA_AXIS,))
        self.mesh = mesh
        self.axis = mesh.axis_names[0]
        split = jax.NamedSharding(self.mesh, jax.P(self.axis))
        home = jax_device(placement.variables)
        at_home = placement.mirrored or placement.mesh is not None
        self.layout = Layout(
            jax.NamedSharding(self.mesh, jax.P()),
            split,
            None if at_home else jax.sharding.SingleDeviceSharding(home),
            own,
        )
        self.local_stacks = LocalStacks(self.count, split)
        # What sharded functions are known to read, and which cannot be sharded.
        self._known: dict[Any, dict[Any, Cell]] = {}
        self._own_traces: set[Any] = set()

    def __call__(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        """The replicas' results, inside of a trace."""
        scope = keras_compat.current_stateless_scope()
        root = scope.root if isinstance(scope, TraceScope) else None
        if isinstance(scope, MergeScope):
            raise ContextError(
                "`run` was called in the function of a `merge_call`, inside another "
                "`run`. On JAX replicas do not run inside replicas: call it after the "
                "outer `run` has returned."
            )
        if root is None:
            raise ContextError(
                "`run` was called where JAX traces or differentiates a function that "
                "is not a `ks.function`. Call it outside, and differentiate in the "
                "replica function, with `ks.value_and_grad`."
            )
        check_sees_all(root, self.strategy)
        root.strategies[id(self.strategy)] = self.strategy
        columns = Columns.of([list(own) for own in args], list(kwargs))
        key = (function_key(fn), columns.signature)
        if self.count == 1 or not columns.even or key in self._own_traces:
            return SideBySide(self, scope, fn)(columns)
        try:
            return self._sharded(key, scope, root, fn, columns)
        except Exception as error:
            # Whatever Python makes of a traced replica number, a branch, a shape, an
            # index; what is wrong in any case is raised again.
            results = SideBySide(self, scope, fn)(columns)
            self._own_traces.add(key)
            _warn_of_own_traces(fn, error)
            return results

    def _sharded(
        self,
        key: Any,
        scope: TraceScope,
        root: ProgramScope,
        fn: Callable[..., Any],
        columns: Columns,
    ) -> list[Any]:
        cells = self._known.get(key, {})
        for _ in range(MAX_TRACES):
            body = Sharded(self, fn, columns, list(cells.values()))
            program = body.program()
            inputs = body.inputs(scope, root)
            results = (program if cells else _abstractly(program))(*inputs)
            if not body.missing:
                break
            cells = {**cells, **body.missing}
        else:
            raise ContextError(
                f"{fn!r} was traced {MAX_TRACES} times, and read variables in each "
                "trace that it had not read in the ones before."
            )
        if not cells:
            results = program(*inputs)
        if len(self._known) < 1000:
            self._known[key] = cells
        return body.finish(scope, root, results)


def run_single_replica(
    strategy: Strategy,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a function on a strategy's only replica."""
    scope = keras_compat.current_stateless_scope()
    root = scope.root if isinstance(scope, TraceScope) else None
    if root is not None:
        root.strategies[id(strategy)] = strategy
    with context.on_replica(
        context.ReplicaContext(strategy, 0, SingleReplica(strategy))
    ):
        return fn(*args, **kwargs)


def _abstractly(program: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: jax.eval_shape(program, *inputs)


def _warn_of_own_traces(fn: Callable[..., Any], error: Exception) -> None:
    code = getattr(fn, "__code__", None)
    if code is None:
        return
    reason = f"{type(error).__name__}: {error}".split("\n")[0]
    warnings.warn_explicit(
        f"The Python of {fn.__qualname__!r} depends on the replica that it runs on, so "
        "that its replicas are not one program. On JAX every device then computes all "
        "of them, one after the other. With `keras.ops.where` or `keras.ops.cond` in "
        "place of Python's `if`, each device computes its own alone. What did not "
        f"work: {reason}",
        UserWarning,
        code.co_filename,
        code.co_firstlineno,
    )
