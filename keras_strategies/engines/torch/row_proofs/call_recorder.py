"""Records the ATen operations of a layer call and its backward pass on fake tensors.

Fake tensors have shapes and no values, so nothing is computed. Each value has a number,
its version: an operation that changes a tensor in place gives it, and the views of it,
new versions. Copies and aliases share the version of their source.

Numbers and arrays of Python that become tensors in the call have known values, and so
have small results of these: Python can read them. Other reads of values are rejected.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from keras_strategies.engines.torch.compat import (
    TorchDispatchMode,
    decomposition_of,
    storage_key,
)
from keras_strategies.engines.torch.row_proofs.function_log import FunctionLog
from keras_strategies.engines.torch.row_proofs.recorded_steps import (
    OperationTraits,
    RecordedStep,
    ValueTraits,
    Version,
    operation_name,
    operation_traits,
)
from keras_strategies.engines.torch.row_proofs.result_shapes import result_shapes
from keras_strategies.engines.torch.row_proofs.value_placements import Shape

#: The most entries of a tensor whose values are known.
_MOST_KNOWN = 16384
#: The most truth values that Python may read.
_MOST_BRANCHES = 4
_CPU = torch.device("cpu")
# Functions that read the values of tensors without an operation.
_READS = frozenset(
    getattr(torch.Tensor, name)
    for name in ("numpy", "tolist", "__array__", "__dlpack__", "data_ptr")
)
_DEVICE = torch.ops.prim.device.default


class ValueRead(Exception):
    """Python reads a value of a tensor, which has none here."""


class CallRecorder(TorchDispatchMode):
    """Records operations while it is entered.

    Python may read truth values: it gets those of `branches`, and True after these.

    Args:
        fake: the mode of the fake tensors.
        branches: the truth values that Python reads, in this order.
        has_log: bool, whether the functions that the call uses are noted.

    Attributes:
        steps: the recorded operations.
        values: traits of each version.
        origins: what the versions are that no operation gives.
        problem: str, the first thing that shows that operations are not all; empty.
        places: the layers that operations are in, see `RecordedStep`.
        outside: by version the tensors that come from elsewhere.
        branches: the truth values that Python has read.
        is_drawing: bool, whether a function that draws random numbers is called.
        log: the functions that the call uses; None where they are not noted.
    """

    def __init__(self, fake: Any, branches: Sequence[bool] = (), has_log: bool = False):
        super().__init__()
        self._fake = fake
        self.steps: list[RecordedStep] = []
        self.values: list[ValueTraits] = []
        self.origins: dict[int, Any] = {}
        self.problem = ""
        self.branches: list[bool] = []
        self._branches = list(branches)
        self.places: list[Any] = []
        self.place: int | None = None
        self.outside: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        # Tensors that live as long as this, so that ids and storages are unique.
        self._alive: list[torch.Tensor] = []
        self._by_storage: dict[int, list[torch.Tensor]] = {}
        self._fakes: dict[int, torch.Tensor] = {}
        self._is_paused = False
        self.is_drawing = False
        self.log = FunctionLog(self._origin) if has_log else None
        self._is_in_operation = False
        self._functions = _Functions(self)

    def __enter__(self) -> CallRecorder:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def close(self) -> list[weakref.ref[torch.Tensor]]:
        """Drops all tensors, and returns weak references to those that were made."""
        outside = set(map(id, self.outside.values()))
        made = [weakref.ref(t) for t in self._alive if id(t) not in outside]
        self._alive.clear()
        self._by_storage.clear()
        self._fakes.clear()
        if self.log is not None:
            self.log.close()
        return made

    # Values.

    def add_input(
        self,
        origin: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
    ) -> torch.Tensor:
        """A fake tensor for a value from outside: an argument, or a variable.

        Args:
            origin: what it is, equal in all recordings.
            shape: its shape.
            dtype: its dtype.
            requires_grad: bool, whether it gets a gradient.
        """
        tensor = self._empty(shape, dtype)
        with self.paused():
            tensor.requires_grad_(requires_grad)
            version = self._new_version(tensor)
        self.origins[version] = origin
        self._register(tensor, version)
        return tensor

    def add_zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A fake tensor with known values, which are zero."""
        with self.paused():
            values = torch.zeros(list(shape), dtype=dtype, device=_CPU)
        return self._constant(values, values)

    def version(self, tensor: torch.Tensor) -> int:
        """The version of a tensor now."""
        found = self._versions.get(id(tensor))
        if found is None:
            return self._version_of_stranger(tensor)
        return found

    def known(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor, if they are known."""
        found = self._versions.get(id(tensor))
        return None if found is None else self.values[found].known

    def reject(self, problem: str) -> None:
        """Notes why the operations are not all that the call does."""
        self.problem = self.problem or problem

    def add_marked(self, name: str, tensor: torch.Tensor, shape: Shape) -> torch.Tensor:
        """Records an operation of this package, with a result of a shape."""
        return self.add_step(name, (tensor,), [(shape, tensor.dtype)])[0]

    def add_step(
        self,
        name: str,
        arguments: tuple[Any, ...],
        results: Sequence[tuple[Shape, torch.dtype]],
    ) -> list[torch.Tensor]:
        """Records an operation of this package.

        Args:
            name: its name.
            arguments: its arguments; also lists of tensors.
            results: the shapes and dtypes of its results.
        """
        step = RecordedStep(name, self._encoded(arguments), {}, [], self.place)
        found = [self._empty(shape, dtype) for shape, dtype in results]
        for result in found:
            version = self._new_version(result)
            self._register(result, version)
            step.results.append(version)
        self.steps.append(step)
        if self.log is not None:
            self.log.note(name, arguments, found)
        return found

    def note(self, function: Any, arguments: Any, results: Any) -> None:
        """Notes a function of torch that the code of the call has used."""
        is_code = not self._is_paused and not self._is_in_operation
        if self.log is not None and is_code:
            self.log.note(function, arguments, results)

    def _origin(self, tensor: torch.Tensor) -> Any:
        """What a tensor is that no function of torch has returned."""
        if not isinstance(tensor, self._fake_tensor):
            return "outside", id(tensor)
        origin = self.origins.get(self._versions.get(id(tensor), -1))
        if origin is None and self.is_forward:
            self.reject("it uses a tensor whose operations are unknown")
        return origin

    @property
    def is_forward(self) -> bool:
        """Whether the call is recorded, and not a backward pass."""
        return self.place is not None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Operations that are not recorded."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self.paused(), self._fake:
            return torch.empty(list(shape), dtype=dtype, device=_CPU)

    def _new_version(
        self, tensor: torch.Tensor, known: torch.Tensor | None = None
    ) -> int:
        is_dense = tensor.is_contiguous() and not tensor.storage_offset()
        traits = ValueTraits(tuple(tensor.shape), tensor.dtype, is_dense, known)
        self.values.append(traits)
        return len(self.values) - 1

    def _register(self, tensor: torch.Tensor, version: int) -> None:
        key = id(tensor)
        if key not in self._versions:
            self._alive.append(tensor)
            self._by_storage.setdefault(storage_key(tensor), []).append(tensor)
        self._versions[key] = version

    def _constant(
        self, tensor: torch.Tensor, known: torch.Tensor | None
    ) -> torch.Tensor:
        """A fake tensor for one that the call made of numbers, or read."""
        with self.paused(), self._fake:
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU
            )
        version = self._new_version(fake, known)
        self.origins[version] = "constant"
        self._register(fake, version)
        return fake

    def _from_outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor for one with values, which the call did not make."""
        fake = self._fakes.get(id(tensor))
        if fake is None:
            if tensor.requires_grad:
                self.reject("it uses a trained tensor that is no variable of a layer")
            fake = self._fakes[id(tensor)] = self._constant(tensor, None)
            self._alive.append(tensor)
            self.outside[self._versions[id(fake)]] = tensor
        return fake

    def _version_of_stranger(self, tensor: torch.Tensor) -> int:
        if not isinstance(tensor, self._fake_tensor):
            return self._versions[id(self._from_outside(tensor))]
        self.reject("it uses a tensor whose operations are unknown")
        version = self._new_version(tensor)
        self._register(tensor, version)
        return version

    @functools.cached_property
    def _fake_tensor(self) -> type:
        return type(self._empty((0,), torch.float32))

    # Operations.

    def __torch_dispatch__(  # type: ignore[no-untyped-def]
        self, func, types, args=(), kwargs=None
    ) -> Any:
        if func is _DEVICE:
            return _CPU
        before, self._is_in_operation = self._is_in_operation, True
        try:
            return self._dispatched(func, args, kwargs or {})
        finally:
            self._is_in_operation = before

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._is_paused or func.namespace == "prim":
            return func(*args, **kwargs)
        traits = operation_traits(func)
        if traits.name in ("lift_fresh", "lift") and not isinstance(
            args[0], self._fake_tensor
        ):
            is_small = args[0].numel() <= _MOST_KNOWN
            return self._constant(args[0], args[0].clone() if is_small else None)
        kwargs = {k: self._argument(v) for k, v in kwargs.items()}
        if "generator" in kwargs:
            kwargs["generator"] = None
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        args = tuple(map(self._argument, args))
        if traits.reads_values and not _indexes_by_numbers(traits.name, args):
            shapes = result_shapes(traits.name, args)
            if shapes is None or self._known_arguments((args, kwargs)) is not None:
                return self._read(func, args, kwargs)
            return self._record(func, traits, args, kwargs, shapes)
        if traits.is_copy:
            return self._copy(func, args, kwargs)
        if not traits.has_own_rule:
            decomposition = decomposition_of(func)
            if decomposition is not None:
                with self:
                    return decomposition(*args, **kwargs)
        return self._record(func, traits, args, kwargs)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if isinstance(value, self._fake_tensor):
                return value
            return self._from_outside(value)
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._argument, value)) if value else value
        return value

    def _read(self, func: Any, args: Any, kwargs: Any) -> Any:
        known = self._known_arguments((args, kwargs))
        if known is not None and torch.Tag.dynamic_output_shape not in func.tags:
            return func(*known[0], **known[1])
        if known is not None:
            result = func(*known[0], **known[1])
            return self._constant(result, result)
        name = operation_name(func)
        if name == "_local_scalar_dense" and args[0].dtype is torch.bool:
            return self._branch(args[0])
        text = "a number" if name == "_local_scalar_dense" else f"'{name}'"
        return self.rejected_read(f"{text} depends on values that Python reads")

    def _branch(self, tensor: torch.Tensor) -> bool:
        """The truth value that Python reads of a tensor."""
        taken = len(self.branches)
        if taken == _MOST_BRANCHES:
            self.rejected_read("Python reads many truth values of tensors")
        choice = self._branches[taken] if taken < len(self._branches) else True
        self.branches.append(choice)
        argument = Version(self.version(tensor))
        step = RecordedStep("branch", (argument,), {}, [], self.place)
        self.steps.append(step)
        return choice

    def rejected_read(self, problem: str) -> Any:
        self.reject(problem)
        raise ValueRead(problem)

    def _copy(self, func: Any, args: Any, kwargs: Any) -> Any:
        version = self.version(args[0])
        with self._fake:
            result = func(*args, **kwargs)
        self._register(result, version)
        return result

    def _record(
        self,
        func: Any,
        traits: OperationTraits,
        args: Any,
        kwargs: Any,
        shapes: Sequence[tuple[Shape, torch.dtype]] | None = None,
    ) -> Any:
        """Records an operation.

        Args:
            shapes: those of its results, where they do not follow from the arguments
                by themselves.
        """
        step = RecordedStep(
            func,
            self._encoded(args),
            self._encoded(kwargs),
            [],
            self.place,
            self.is_drawing,
        )
        known = None
        if not traits.is_drawing:
            known = self._known_arguments((args, kwargs))
        if shapes is None:
            with self._fake:
                result = func(*args, **kwargs)
        else:
            result = tuple(self._empty(*each) for each in shapes)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        values = self._known_results(func, known, results)
        changed = self._changed(traits, args, kwargs)
        before = {id(tensor): self.version(tensor) for tensor in changed}
        # A changed argument that is not a result becomes one.
        ids = set(map(id, results))
        results += [tensor for tensor in changed if id(tensor) not in ids]
        for i, each in enumerate(results):
            if not isinstance(each, torch.Tensor):
                step.results.append(None)
                continue
            of_result = values[i] if values is not None and i < len(values) else None
            version = self._new_version(each, of_result)
            self._register(each, version)
            step.results.append(version)
        self.steps.append(step)
        if not traits.changes_shape:
            for tensor in changed:
                self._change_views(tensor, before[id(tensor)])
        return result

    def _encoded(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Version(self.version(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(self._encoded, value))
        if isinstance(value, dict):
            return {k: self._encoded(v) for k, v in value.items()}
        return value

    def _known_arguments(self, value: Any) -> Any:
        """Arguments with known values in place of fake tensors; None if one is not."""
        found = []
        for tensor in _tensors(value):
            known = self.known(tensor)
            if known is None:
                return None
            found.append(known)
        values = iter(found)
        # An operation may change them.
        return _replaced(value, lambda: next(values).clone())

    def _known_results(
        self, func: Any, known: Any, results: Sequence[Any]
    ) -> list[Any] | None:
        tensors = [each for each in results if isinstance(each, torch.Tensor)]
        if known is None or any(t.numel() > _MOST_KNOWN for t in tensors):
            return None
        try:
            found = func(*known[0], **known[1])
        except (RuntimeError, NotImplementedError):
            # The fake tensors have accepted the arguments, for example on a device
            # whose values cannot be read.
            return None
        return list(found) if isinstance(found, (list, tuple)) else [found]

    def _changed(
        self, traits: OperationTraits, args: Any, kwargs: Any
    ) -> list[torch.Tensor]:
        changed = []
        for position, name in traits.changed:
            value = args[position] if position < len(args) else kwargs.get(name)
            for tensor in _tensors(value):
                if self._versions.get(id(tensor)) in self.outside:
                    self.reject(
                        f"'{traits.name}' changes a tensor of elsewhere in place"
                    )
                if self.log is not None:
                    self.log.note_change(self._by_storage.get(storage_key(tensor), ()))
                changed.append(tensor)
        return changed

    def _change_views(self, tensor: torch.Tensor, before: int) -> None:
        """New versions of the other tensors that share a changed tensor's memory."""
        version = self.version(tensor)
        for other in self._by_storage[storage_key(tensor)]:
            if other is tensor:
                continue
            if _is_same_view(other, tensor):
                self._versions[id(other)] = version
                continue
            arguments = (
                Version(self.version(other)),
                Version(before),
                Version(version),
            )
            own = self._new_version(other)
            self._versions[id(other)] = own
            self.steps.append(
                RecordedStep("written_view", arguments, {}, [own], self.place)
            )


def _indexes_by_numbers(name: str, args: Sequence[Any]) -> bool:
    """Whether an operation is an index with numbers, not truth values."""
    return name in ("index", "index_put") and all(
        index.dtype not in (torch.bool, torch.uint8) for index in _tensors(args[1])
    )


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (*one.shape, *one.stride(), one.storage_offset()) == (
        *other.shape,
        *other.stride(),
        other.storage_offset(),
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _replaced(value: Any, tensor: Callable[[], torch.Tensor]) -> Any:
    """A structure with other tensors, in the order of `_tensors`."""
    if isinstance(value, torch.Tensor):
        return tensor()
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(each, tensor) for each in value)
    if isinstance(value, dict):
        return {key: _replaced(each, tensor) for key, each in value.items()}
    return value


class _Functions(TorchFunctionMode):
    """Notes functions, and reads of values that the dispatcher does not see."""

    def __init__(self, recorder: CallRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS:
            known = self._recorder.known(args[0])
            if known is None:
                name = func.__name__
                return self._recorder.rejected_read(f"'{name}' reads values")
            return func(known, *args[1:], **kwargs)
        found = func(*args, **kwargs)
        self._recorder.note(func, (args, kwargs), found)
        return found
