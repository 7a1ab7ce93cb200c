"""Which layer calls are compiled, for models with `jit_compile=True`.

`torch.compile` does not follow a step to its replicas. So the layer call of a replica
is traced once, without Dynamo, and compiled, forward and backward
(`call_programs.py`); all replicas of a device call the same program. Programs are for
one number of rows: one for any number would be slower, and conditions on it that the
compiler finds are not checked in each call. A short last batch is called eagerly, as
are losses, metrics and the optimizer.

All replicas and workers decide alike: by how often a number of rows has occurred, and,
once for each number, by what each worker says of its programs.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras
import torch

from keras_strategies.communication.communicator import is_fixed
from keras_strategies.engines.torch.compat import (
    dispatch_modes,
    function_modes,
    saved_tensors_hooks_of_thread,
)
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.models.layers import get_mask, sublayers
from keras_strategies.rows.declarations import is_declared
from keras_strategies.rows.python_state import argument_key
from keras_strategies.runtime.data_parallel.split_plan import SplitPlan
from keras_strategies.runtime.state.replica_state import ReplicaResult
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.engines.torch.data_parallel.call_programs import CallProgram

# A number of rows is compiled when it occurs for so many times.
_OCCURRENCES = 3
# Numbers of rows, and settings of layers, that are compiled for one kind of calls.
_MOST = 4
# Seconds between messages of a worker that compiles.
_INTERVAL = 20.0
_MANY_ROWS = f"batches have more numbers of rows than are compiled ({_MOST})"

_is_compiled: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "is_compiled", default=False
)


@contextlib.contextmanager
def compiled_calls() -> Iterator[None]:
    """Context of a step of a model that was compiled with `jit_compile=True`."""
    token = _is_compiled.set(True)
    try:
        yield
    finally:
        _is_compiled.reset(token)


@dataclass
class _Kind:
    """Calls of a layer with arguments of the same kinds.

    Args:
        occurrences: by the rows of all replicas, how often they have occurred.
        variables: those that a call reads; None before the first one.
        in_half: bool, whether reads have gradients of their own in float16.
        programs: by the rows of all replicas: by proof, rows of the replica and its
            device, the proof and the program; None for rows that are called eagerly.
    """

    occurrences: collections.Counter[tuple[int, ...]] = field(
        default_factory=collections.Counter
    )
    variables: list[Any] | None = None
    in_half: bool = False
    programs: dict[tuple[int, ...], dict[Any, tuple[Any, CallProgram]] | None] = field(
        default_factory=dict
    )

    def note(self, result: ReplicaResult) -> None:
        """Takes the variables that a replica has read."""
        reads = result.state.reads
        found = {id(variable): variable for variable, _ in reads.values()}
        self.variables = list(found.values())
        self.in_half = any(isinstance(key, tuple) for key in reads)


class CompiledCalls:
    """The programs of a strategy's layer calls."""

    def __init__(self) -> None:
        self._kinds: weakref.WeakKeyDictionary[Any, dict[Any, _Kind]] = (
            weakref.WeakKeyDictionary()
        )
        self._warned: weakref.WeakKeyDictionary[Any, set[str]] = (
            weakref.WeakKeyDictionary()
        )

    def kind_of(
        self, plan: SplitPlan, slices: Sequence[Sequence[torch.Tensor]]
    ) -> _Kind | None:
        """The kind of a call; None if it is called eagerly.

        Args:
            plan: the plan of the call.
            slices: for each tensor that is split its slices.
        """
        call = plan.layer_call
        if (
            not _is_compiled.get()
            or call.adds
            or not isinstance(call.layer, keras.layers.Layer)
        ):
            return None
        kinds = self._kinds.setdefault(call.layer, {})
        return kinds.setdefault(_key(plan, slices), _Kind())

    def programs(
        self,
        kind: _Kind,
        plan: SplitPlan,
        devices: Sequence[torch.device],
        has_shards: bool,
        make: Callable[[int, Sequence[Any]], CallProgram],
    ) -> list[CallProgram] | None:
        """The program of each local replica; None to call the layer eagerly.

        Args:
            kind: the kind of the call.
            plan: its plan.
            devices: the devices of the local replicas.
            has_shards: bool, whether it reads variables in shards.
            make: compiles that of a replica, for variables that are read.

        Raises:
            ContextError: if this worker alone cannot compile the call again.
        """
        every, layer = tuple(plan.row_split.every), plan.layer_call.layer
        kind.occurrences[every] += 1
        if kind.occurrences[every] < _OCCURRENCES or not kind.variables:
            return None
        if every not in kind.programs:
            known: dict[Any, tuple[Any, CallProgram]] = {}
            kind.programs[every] = known
            problem = _agreed(
                plan,
                lambda: (
                    _problem(kind, plan, has_shards)
                    or _compile(kind, plan, devices, known, make)
                ),
            )
            if problem:
                kind.programs[every] = None
                self._warn(layer, problem)
        found = kind.programs[every]
        if found is None:
            return None
        problem = _compile(kind, plan, devices, found, make)
        if problem and plan.row_split.workers is not None:
            raise ContextError(
                f"Layer {layer.name!r} has other attributes than before on this "
                f"worker, for which its call cannot be compiled: {problem}. Other "
                "workers call a program. Use `jit_compile=False`."
            )
        if problem:
            self._warn(layer, problem)
            return None
        return [found[key][1] for key in _keys(plan, devices)]

    def _warn(self, layer: Any, problem: str) -> None:
        """Says once why a layer is called eagerly."""
        known = self._warned.setdefault(layer, set())
        if problem not in known:
            known.add(problem)
            warn_user(
                f"Layer {layer.name!r} ({type(layer).__name__}) is called eagerly, "
                f"though `jit_compile=True`: {problem}."
            )


def _agreed(plan: SplitPlan, problem: Callable[[], str]) -> str:
    """What a function says, or another worker's: all call their programs, or none.

    A thread tells the others now and then that this worker is still compiling, so that
    none of them takes it for lost.
    """
    workers = plan.row_split.workers
    if workers is None or not is_fixed(workers):
        return problem()
    group, own, is_done = workers.group, ["it was interrupted"], threading.Event()

    def answers() -> str:
        every: list[str | None] = [None]
        while None in every:
            is_done.wait(_INTERVAL)
            every = group.gather_values(
                f"the compiled call of layer {plan.layer_call.layer.name!r}",
                own[0] if is_done.is_set() else None,
                "compiled calls",
            )
        return max(each for each in every if each is not None)

    with ThreadPoolExecutor(1, "compiled-calls") as thread:
        answer = thread.submit(answers)
        try:
            own[0] = problem()
        finally:
            is_done.set()
        return answer.result()


def _compile(
    kind: _Kind,
    plan: SplitPlan,
    devices: Sequence[torch.device],
    known: dict[Any, tuple[Any, CallProgram]],
    make: Callable[[int, Sequence[Any]], CallProgram],
) -> str:
    """Adds the programs of a call that are not known yet.

    Returns:
        str, why there are none, as the end of a sentence; empty without a problem.
    """
    from keras_strategies.engines.torch.data_parallel.program_ops import (
        NotCompiledError,
    )

    keys = _keys(plan, devices)
    if all(key in known for key in keys):
        return ""
    if len({id(proof) for proof, _ in known.values()}) >= _MOST:
        if plan.row_split.workers is None:
            return "attributes of its layers change from call to call"
        known.clear()  # Other workers may call a program, where nothing has changed.
    try:
        for i, key in enumerate(keys):
            if key not in known:
                known[key] = plan.proof, make(i, kind.variables or ())
    except NotCompiledError as error:
        return str(error)
    return ""


def _keys(plan: SplitPlan, devices: Sequence[torch.device]) -> list[Any]:
    """A key of each local replica's program."""
    pairs = zip(plan.row_split.sizes, devices, strict=True)
    return [(id(plan.proof), rows, device) for rows, device in pairs]


def _problem(kind: _Kind, plan: SplitPlan, has_shards: bool) -> str:
    """Why calls of a kind are not compiled, known before a trace."""
    layer, proof = plan.layer_call.layer, plan.proof
    leaves = [leaf for leaf in plan.layer_call.leaves if keras.ops.is_tensor(leaf)]
    compiled = [each for each in kind.programs.values() if each is not None]
    reasons = {
        _MANY_ROWS: len(compiled) > _MOST,
        "workers may come and go": not is_fixed(plan.row_split.workers),
        "its variables are in shards": has_shards,
        "it reads variables in float16": kind.in_half,
        "what code of a layer reads that is declared as row-wise is not known": (
            any(map(is_declared, sublayers(layer)))
        ),
        "it draws random numbers as Keras without a strategy": (
            bool(proof.draws) and not plan.strategy.partitions_draws
        ),
        "an argument is a tensor without rows": (
            any(leaf.shape[:1] != (plan.layer_call.rows,) for leaf in leaves)
        ),
        "hooks, modes or autocast of torch are active": (
            saved_tensors_hooks_of_thread() is not None
            or bool(function_modes() or dispatch_modes())
            or any(map(torch.is_autocast_enabled, {"cpu", *_types(leaves)}))
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _types(tensors: Sequence[torch.Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors}


def _key(plan: SplitPlan, slices: Sequence[Sequence[torch.Tensor]]) -> Any:
    """A key of a call, without its rows and the attributes of layers."""
    args, kwargs = plan.layer_call.structure
    leaves = [
        get_mask(leaf) is not None if keras.ops.is_tensor(leaf) else argument_key(leaf)
        for leaf in plan.layer_call.leaves
    ]
    return (
        *(len(args), *sorted(kwargs), *leaves),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        *(
            (each.dtype, each.shape[1:], each.stride(), each.requires_grad)
            for each, *_ in slices
        ),
    )
