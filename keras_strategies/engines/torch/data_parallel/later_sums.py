"""Sums over workers that a step needs later than it begins to send them.

The value of a loss is a sum over workers, but its gradient is not: a backward pass that
waited for the value would make every worker wait for the slowest one twice in a step.
In a step such a sum is a tensor with a value that arrives when it is needed. What
Keras computes from it before the backward pass (factors, regularizers, the average in a
metric) is put off with it.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from keras_strategies.engines.torch.compat import tensor_without_memory
from keras_strategies.engines.torch.data_parallel.tensor_on_demand import (
    TensorOnDemand,
    on_values,
)
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator
from keras_strategies.keras_compat.variables.values import (
    IdSet,
    raw_value,
    set_raw_value,
)
from keras_strategies.runtime.data_parallel.later_values import LaterValue
from keras_strategies.types import ReduceOp

_aten = torch.ops.aten
# Functions without effects, of numbers, that may be computed later.
_PUT_OFF = frozenset(
    (
        _aten.add.Tensor,
        _aten.sub.Tensor,
        _aten.mul.Tensor,
        _aten.div.Tensor,
        _aten.neg.default,
        _aten.stack.default,
        _aten.sum.default,
        _aten.sum.dim_IntList,
        _aten.mean.default,
        _aten._to_copy.default,
    )
)
# Functions of a tensor's shape and dtype.
_LIKE = frozenset((_aten.ones_like.default, _aten.zeros_like.default))


class _Result:
    """A plain tensor that is computed once, when it is needed, and never changed."""

    def __init__(self, compute: Callable[[], torch.Tensor]):
        self._compute: Callable[[], torch.Tensor] | None = compute
        self._found: torch.Tensor | None = None
        self._lock = threading.Lock()

    def get(self) -> torch.Tensor:
        with self._lock:
            if self._compute is not None:
                self._found = self._compute()
                self._compute = None
        assert self._found is not None
        return self._found


class _Memory:
    """What a tensor and its aliases have in common: a result, then memory."""

    def __init__(self, result: _Result | None, found: torch.Tensor | None = None):
        self.result = result
        self.found = found

    def get(self) -> torch.Tensor:
        if self.result is not None:
            # The tensor can be changed in place; what is computed from it before
            # that has the old value.
            self.found, self.result = self.result.get().clone(), None
        assert self.found is not None
        return self.found


class LaterTensor(TensorOnDemand, LaterValue):
    """A tensor that is, or is computed from, a sum over workers on its way.

    Args:
        memory: its value, shared by aliases of the tensor.
        stand_in: tensor of its shape, dtype and device, with any values.
    """

    _memory: _Memory
    _stand_in: torch.Tensor

    @staticmethod
    def __new__(cls, memory: _Memory, stand_in: torch.Tensor) -> LaterTensor:
        found: LaterTensor = tensor_without_memory(
            cls, stand_in.shape, stand_in.dtype, stand_in.device
        )
        return found

    def __init__(self, memory: _Memory, stand_in: torch.Tensor):
        self._memory = memory
        self._stand_in = stand_in

    def demanded(self) -> torch.Tensor:
        return self._memory.get()

    def put_off(self, variables: Iterable[Any]) -> None:
        sums = _current.get()
        if sums is not None and self._memory.result is not None:
            sums.update(variables)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PUT_OFF:
            put_off = _put_off(func, args, kwargs)
            if put_off is not None:
                return put_off
        elif func in _LIKE:
            return func(args[0]._stand_in, **kwargs)
        elif func is _aten.detach.default:
            return cls(args[0]._memory, args[0]._stand_in)
        elif func is _aten.copy_.default:
            target, value = args[0], args[1]
            if isinstance(target, cls) and target._takes(value):
                return target
            sums = _current.get()
            if sums is not None:
                sums.waits_for(target, value)
        return on_values(cls, func, args, kwargs)

    def _takes(self, value: Any) -> bool:
        """Assigns a value that comes later; False for other values."""
        if (
            not _is_later(value)
            or value.shape != self.shape
            or value.dtype != self.dtype
        ):
            return False
        self._memory.result = value._memory.result
        return True


def _is_later(value: Any) -> bool:
    return isinstance(value, LaterTensor) and value._memory.result is not None


def _put_off(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> LaterTensor | None:
    """The result of a function that is computed later; None if it need not be."""
    if isinstance(args[0], (list, tuple)):
        found = _captured(args[0])
        parts = None if found is None else ([found[0]], [found[1]])
    else:
        parts = _captured(args)
    if parts is None:
        return None
    own, stand_ins = parts
    rest = args[len(own) :]

    def compute() -> torch.Tensor:
        found: torch.Tensor = func(*_computed(own), *rest, **kwargs)
        return found

    return LaterTensor(_Memory(_Result(compute)), func(*stand_ins, *rest, **kwargs))


def _captured(values: Sequence[Any]) -> tuple[list[Any], list[Any]] | None:
    """Values that may be changed before they are used, and stand-ins for them.

    None if all of them are there, or one is large.
    """
    is_later, own, stand_ins = False, [], []
    for value in values:
        if type(value) is LaterTensor:
            stand_ins.append(value._stand_in)
            result = value._memory.result
            is_later = is_later or result is not None
            own.append(value.demanded().clone() if result is None else result)
        elif isinstance(value, torch.Tensor):
            if isinstance(value, TensorOnDemand) or value.numel() != 1:
                return None
            stand_ins.append(value)
            own.append(value.clone())
        else:
            stand_ins.append(value)
            own.append(value)
    return (own, stand_ins) if is_later else None


def _computed(values: Sequence[Any]) -> list[Any]:
    return [
        _computed(value)
        if isinstance(value, list)
        else (value.get() if isinstance(value, _Result) else value)
        for value in values
    ]


class LaterSums:
    """The sums of steps of one kind, and the variables that are computed from them."""

    def __init__(self) -> None:
        # Variables that were updated with later values. They have such values from the
        # beginning of a step on, since code may keep what it reads of a variable, and
        # look at it again when that has changed.
        self._known = IdSet()
        # Variables of metrics that are updated in this step, by their memory.
        self._updated: dict[int, Any] = {}
        self._sums: list[_Result] = []
        self._variables: list[tuple[Any, torch.Tensor, LaterTensor]] = []

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Entered around a step, at the end of which all sums have arrived.

        Raises:
            WorkerError: if a worker is lost before that.
        """
        token = _current.set(self)
        try:
            self._begin()
            yield
            self._end()
        finally:
            _current.reset(token)
            for variable, raw, own in self._variables:
                if raw_value(variable) is own:
                    set_raw_value(variable, raw)
            self._variables.clear()
            self._updated.clear()
            self._sums.clear()

    def add(self, result: _Result) -> None:
        """Adds a sum that is on its way."""
        self._sums.append(result)

    def update(self, variables: Iterable[Any]) -> None:
        """Notes variables that may be assigned what is computed from a sum."""
        for variable in variables:
            raw = raw_value(variable)
            if isinstance(raw, torch.Tensor) and not isinstance(raw, LaterTensor):
                self._updated[id(raw)] = variable

    def waits_for(self, target: torch.Tensor, value: Any) -> None:
        """Notes that the memory of a variable is assigned a value that comes later."""
        variable = self._updated.get(id(target))
        if variable is not None and value.shape == target.shape:
            self._known.add(variable)

    def _begin(self) -> None:
        for variable in self._known:
            raw = raw_value(variable)
            if isinstance(raw, torch.Tensor):
                own = LaterTensor(_Memory(None, raw.detach()), raw.detach())
                self._variables.append((variable, raw, own))
                set_raw_value(variable, own)

    def _end(self) -> None:
        for result in self._sums:
            result.get()
        with torch.no_grad():
            for _, raw, own in self._variables:
                value = own.demanded()
                if value.data_ptr() != raw.data_ptr():
                    raw.copy_(value)
                    # Kept by code, it is the variable itself, as on one device.
                    own._memory.found = raw.detach()


_current: contextvars.ContextVar[LaterSums | None] = contextvars.ContextVar(
    "later_sums", default=None
)


def later_sum(
    own: torch.Tensor, workers: TorchCommunicator, dtype: torch.dtype
) -> torch.Tensor:
    """The sum of a tensor over workers, which arrives later in a step.

    Args:
        own: the tensor of this worker, without gradient.
        workers: the communicator of the workers.
        dtype: the dtype of the result.
    """
    sums = _current.get()
    if sums is None or own.numel() != 1:
        [total] = workers.all_reduce(ReduceOp.SUM, [own])
        return total.to(dtype)
    message = own.detach().clone()
    wait = workers.start_all_reduce(ReduceOp.SUM, message)

    def arrived() -> torch.Tensor:
        wait()
        return message.to(dtype)

    result = _Result(arrived)
    sums.add(result)
    return LaterTensor(_Memory(result), own.detach().to(dtype))
