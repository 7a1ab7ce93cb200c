"""`Strategy.run` on Torch."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from keras_strategies import context
from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.engines.torch.data_parallel.gradient_sums import (
    in_dtype_of,
    widened,
)
from keras_strategies.engines.torch.devices import torch_device
from keras_strategies.engines.torch.replicas.replica_random import RandomCalls
from keras_strategies.engines.torch.replicas.replica_threads import ReplicaThreads
from keras_strategies.engines.torch.replicas.replica_variables import ReplicaVariables
from keras_strategies.engines.torch.replicas.thread_collectives import (
    ThreadCollectives,
)
from keras_strategies.engines.torch.tensor_primitives import PRIMITIVES
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.thread_state import outside_stateless_scopes
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.drivers import RunDriver
from keras_strategies.runtime.replicas.replica_set import ReplicaSet
from keras_strategies.runtime.state import run_state
from keras_strategies.runtime.state.run_state import (
    CreatedVariables,
    LocalValues,
    RunState,
    SequentialRunNeededError,
)
from keras_strategies.types import ReduceOp
from keras_strategies.values import DistributedValues, select_replica

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TorchLocalValues(LocalValues):
    """On-read values: tensors on the replicas' devices."""

    def __init__(self, devices: Sequence[torch.device], replica_set: ReplicaSet):
        self._devices = tuple(devices)
        self._replica_set = replica_set
        self._values = WeakTensorKeyDictionary()

    def _all(self, variable: Any) -> list[torch.Tensor]:
        raw = raw_value(variable)
        if raw not in self._values:
            self._distribute(variable, raw.detach().clone())
        return self._values[raw]

    def _distribute(self, variable: Any, value: torch.Tensor) -> None:
        first = self._replica_set.first
        parts = run_state.parts(variable, value, self._replica_set.total)
        parts = parts[first : first + len(self._devices)]
        self._values[raw_value(variable)] = [
            part.to(device) for part, device in zip(parts, self._devices, strict=True)
        ]

    def get(self, variable: Any, replica_id: int) -> torch.Tensor:
        return self._all(variable)[replica_id - self._replica_set.first]

    def commit(self, variable: Any, values: Sequence[torch.Tensor]) -> None:
        raw = raw_value(variable)
        kept = [value.detach() for value in values]
        [lead] = self._replica_set.all_values(
            [[value.to(raw.device) for value in kept]]
        )
        with torch.no_grad():
            raw.copy_(run_state.cross_replica_value(variable, lead))
        self._values[raw] = kept

    def assigned(self, variable: Any, value: Any) -> None:
        if raw_value(variable) in self._values:
            self._distribute(variable, raw_value(variable).detach().clone())


class TorchRun(RunDriver):
    """Runs functions on the replicas of one strategy.

    Args:
        strategy: the strategy.
        threads: the threads of the replicas.
        variables: the replicas' copies of variables.
    """

    def __init__(
        self,
        strategy: StrategyCore,
        threads: ReplicaThreads,
        variables: ReplicaVariables,
    ):
        self.strategy = strategy
        self._threads = threads
        self._variables = variables
        self.placement = strategy.placement
        self._devices = [torch_device(d) for d in self.placement.replicas]
        workers, share = self.placement.workers, self.placement.share
        counts = (share.count,) if workers is None else workers.replicas
        self.replica_set = ReplicaSet(PRIMITIVES, workers, counts, share.first)
        self.reduction = LocalReduction.of(strategy)
        self.on_read_values = TorchLocalValues(self._devices, self.replica_set)
        self._random_calls = RandomCalls()
        self._has_run: weakref.WeakSet[Any] = weakref.WeakSet()

    # Dynamo cannot follow threads: a compiled step runs around this call.
    @torch.compiler.disable
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
    ) -> list[Any]:
        owner = _owner(fn)
        # The first run of a function may build models, so it is sequential.
        sequential = owner not in self._has_run or len(args) == 1
        merging = _MergeContext(self)
        collectives = self._collectives(sequential, merging)
        try:
            results = self._run(fn, args, kwargs, owner, collectives, merging)
        except SequentialRunNeededError:
            # A later run creates a variable: it is restarted sequentially.
            self._has_run.discard(owner)
            _check_restart(getattr(fn, "__qualname__", repr(fn)), collectives, merging)
            merging = _MergeContext(self)
            collectives = self._collectives(True, merging)
            results = self._run(fn, args, kwargs, owner, collectives, merging)
        self._has_run.add(owner)
        return results

    def _collectives(
        self, is_sequential: bool, merging: _MergeContext
    ) -> ThreadCollectives:
        return ThreadCollectives(
            self.placement.replicas,
            is_sequential,
            self.replica_set,
            self.reduction,
            merging,
        )

    def _run(
        self,
        fn: Callable[..., Any],
        args: Sequence[tuple[Any, ...]],
        kwargs: Sequence[dict[str, Any]],
        owner: Any,
        collectives: ThreadCollectives,
        merging: _MergeContext,
    ) -> list[Any]:
        first = self.replica_set.first
        states = merging.states
        tasks = []
        made = CreatedVariables(collectives.is_sequential)
        for i in range(len(args)):
            replica = context.ReplicaContext(self.strategy, first + i, collectives)
            state = RunState(
                replica, self._copier(i), self.on_read_values.get, made, _assigned
            )
            states.append(state)
            tasks.append(_task(fn, args[i], kwargs[i], replica, state))
        with self._random_calls.call(owner, None) as random:
            results = self._threads.run(tasks, collectives, random)
        self.commit(states)
        return results

    def apply_gradients(
        self,
        apply: Callable[[Sequence[Any], Sequence[Any] | None], Any],
        gradients: Sequence[Any],
        variables: Sequence[Any] | None,
        aggregate: bool,
    ) -> None:
        replica = context.current_replica()
        assert replica is not None
        lead = torch_device(self.placement.variables)

        def update(strategy: StrategyCore, gradients: Sequence[Any]) -> None:
            if aggregate:
                count = len(self.placement.replicas)
                found = sum_gradients(gradients, lead, count, self.reduction)
                total = self._over_workers(found)
                total = list(map(in_dtype_of, total, gradients))
            else:
                total = [select_replica(0, gradient) for gradient in gradients]
            with torch.no_grad():
                apply(total, variables)

        replica.merge_call(update, args=(list(gradients),))

    def _over_workers(self, gradients: list[Any]) -> list[Any]:
        """The sums over workers; None is None on all of them."""
        workers = self.placement.workers
        if workers is None:
            return gradients
        # The last layers have their gradients first.
        present = [gradient for gradient in reversed(gradients) if gradient is not None]
        found = iter(reversed(workers.all_reduce(ReduceOp.SUM, present)))
        return [None if gradient is None else next(found) for gradient in gradients]

    def local_values(self, variable: Any) -> Sequence[torch.Tensor]:
        first = self.placement.share.first
        replicas = range(len(self.placement.replicas))
        return [self.on_read_values.get(variable, first + i).clone() for i in replicas]

    def variable_assigned(self, variable: Any, value: Any) -> None:
        self.on_read_values.assigned(variable, value)

    @contextlib.contextmanager
    def creating_variable(self) -> Iterator[None]:
        with (
            outside_stateless_scopes(),
            self.strategy.drivers.fit.scope(),
        ):
            yield

    def _copier(self, replica_id: int) -> Callable[[Any], Any]:
        return lambda variable: self._variables.copy(replica_id, variable)

    def commit(self, states: Sequence[RunState]) -> None:
        """Assigns the replicas' values to variables."""
        keys = dict.fromkeys(key for state in states for key in state.updates)
        for key in keys:
            having = [state for state in states if key in state.updates]
            variable = having[0].updates[key][0]
            if run_state.is_local(variable):
                self.on_read_values.commit(
                    variable, [state.read(variable) for state in states]
                )
            else:
                raw = raw_value(variable)
                found = [state.updates[key][1] for state in having]
                if self.replica_set.workers is not None:
                    # All of them, as the other workers' are.
                    found = [state.read(variable) for state in states]
                [values] = self.replica_set.all_values(
                    [[value.detach().to(raw.device) for value in found]]
                )
                variable.assign(run_state.merged(variable, values))
            for state in states:
                state.forget([variable])


def _assigned(variable: Any, value: torch.Tensor) -> torch.Tensor:
    """A leaf of the autograd graph: assignments have no gradient."""
    leaf = value.detach()
    if raw_value(variable).requires_grad and torch.is_grad_enabled():
        # A copy: the value may be another variable's memory.
        leaf = leaf.clone().requires_grad_()
    return leaf


def _owner(fn: Callable[..., Any]) -> Any:
    """A key for functions that are recreated in each call: methods, lambdas."""
    if getattr(fn, "__name__", "") == "<lambda>":
        return fn.__code__
    function = getattr(fn, "__func__", fn)
    try:
        weakref.ref(function)
        hash(function)
    except TypeError:
        return type(function)
    return function


def _task(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    replica: context.ReplicaContext,
    state: RunState,
) -> Callable[[], Any]:
    def run() -> Any:
        with context.on_replica(replica), state.scope():
            return fn(*args, **kwargs)

    return run


class _MergeContext:
    """Context of functions of `merge_call`: they see and change the variables.

    Args:
        run: the run, which assigns the replicas' values.
    """

    def __init__(self, run: TorchRun):
        self._run = run
        self.states: list[RunState] = []
        self.was_used = False

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.was_used = True
        lead = str(torch_device(self._run.placement.variables))
        with outside_stateless_scopes(), keras.device(lead):
            self._run.commit(self.states)
            before = {id(v): v for state in self.states for v in state.variables_read()}
            versions = {key: _version(v) for key, v in before.items()}
            try:
                yield
            finally:
                changed = [v for k, v in before.items() if _version(v) != versions[k]]
                for state in self.states:
                    state.forget(changed)


def _check_restart(
    name: str, collectives: ThreadCollectives, merging: _MergeContext
) -> None:
    """Raises if a run so far cannot be repeated."""
    workers = collectives.replica_set.workers
    if merging.was_used or (workers is not None and collectives.has_exchanged):
        raise ContextError(
            f"{name!r} created a variable after a `merge_call` or "
            "`optimizer.apply`, in a run that was not its first. On Torch "
            f"replicas run concurrently then. {run_state.CREATE_ONCE}"
        )


def _version(variable: Any) -> tuple[int, int]:
    raw = raw_value(variable)
    return id(raw), raw._version


def sum_gradients(
    gradients: Sequence[Any],
    lead: torch.device,
    count: int,
    reduction: LocalReduction | None,
) -> list[torch.Tensor | None]:
    """Sums each gradient over replicas, on the lead device; None adds nothing.

    Those of half precision are summed in float32, which is returned.

    Args:
        gradients: for each variable a `PerReplica`, or a value of all replicas.
        lead: the device of the sums.
        count: int, the local replicas.
        reduction: the strategy's `CrossDeviceOps`, None for torch's own sum.
    """
    columns = [
        [None if part is None else widened(part.detach()) for part in parts]
        for parts in (
            gradient.values
            if isinstance(gradient, DistributedValues)
            else [gradient] * count
            for gradient in gradients
        )
    ]
    if reduction is not None:
        return reduction.sums(columns)
    total: list[torch.Tensor | None] = []
    for parts in columns:
        present = [part.to(lead) for part in parts if part is not None]
        total.append(sum(present[1:], start=present[0]) if present else None)
    return total
