"""Memory of a program, counted on its graph without running it.

Operations are taken in the order in which they are ready, as TensorFlow's executor
starts them, and the bytes of all tensors that are alive are counted on each device:

- a tensor that another device uses has a copy there from when it is computed;
- `Reshape` and the like have the memory of their input, and so have elementwise
  operations with an input that nothing else uses any more;
- what a function needs that an operation calls counts while the operation runs, and
  so do the tensors that a loop saves in a list;
- a result of unknown shape counts as the largest input.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.graphs import called_graph
from keras_strategies.engines.tensorflow.row_proofs.rules import elementwise

_FORMS = """
    CheckNumerics EnsureShape ExpandDims Identity IdentityN PreventGradient Reshape
    Snapshot Squeeze StopGradient TensorListFromTensor
"""
_SAME_MEMORY = frozenset(_FORMS.split())
_IN_PLACE = frozenset(
    " ".join(
        [
            *(elementwise.ADDITIONS, elementwise.PRODUCTS, elementwise.QUOTIENTS),
            *(elementwise.LINEAR, elementwise.LINEAR_IN_SECOND, elementwise.NONLINEAR),
            "BiasAdd LogSoftmax Maximum Minimum Select SelectV2 Softmax",
        ]
    ).split()
)
#: Without a device of their own, TensorFlow places them with their input.
_WITH_INPUT = ("Identity", "ReadVariableOp")
#: The functions that operations call, by the names of their attributes.
_CALLED = {
    "PartitionedCall": ["f"],
    "StatefulPartitionedCall": ["f"],
    "While": ["cond", "body"],
    "StatelessWhile": ["cond", "body"],
    "If": ["then_branch", "else_branch"],
    "StatelessIf": ["then_branch", "else_branch"],
}
_LOOPS = ("While", "StatelessWhile")
#: Operations that make a list of the length that is their second input.
_LISTS = ("EmptyTensorList", "TensorListReserve")
#: Operations with a tensor that they add to a list, by the number of the input.
_FILLS = {"TensorListPushBack": 1, "TensorListSetItem": 2}


def peaks_of(graph: Any, home: str, has_arguments: bool = True) -> Counter[str]:
    """The most bytes of tensors on each device at a time, without those of variables.

    Args:
        graph: the graph of a `tf.function`, traced for known shapes.
        home: str, the device of operations that name none, `/device:KIND:INDEX`.
        has_arguments: bool, whether the arguments count.

    Raises:
        ValueError: if a loop saves tensors and the number of its steps is unknown.
    """
    return _Count(graph, home, has_arguments).peaks()


class _Count:
    """The tensors of a graph, while its operations are taken one by one."""

    def __init__(self, graph: Any, home: str, has_arguments: bool):
        self._graph = graph
        self._home = home
        self._has_arguments = has_arguments
        self._operations = _needed(graph)
        self._results = {tensor.name for tensor in graph.outputs}
        self._captured = {
            inner.op.name: _short(outer.device or "") for outer, inner in graph.captures
        }
        self._alive: Counter[str] = Counter()
        self._peaks: Counter[str] = Counter()
        # By memory, a number: its device and bytes, and the operations that wait for it
        # with the number of its tensors that each of them uses.
        self._places: list[tuple[str, int]] = []
        self._users: defaultdict[int, Counter[str]] = defaultdict(Counter)
        # By the names of tensors and devices.
        self._memories: dict[tuple[str, str], int] = {}

    def peaks(self) -> Counter[str]:
        made = self._graph.get_operations()
        needed = [op for op in made if op.name in self._operations]
        for operation in _in_order(needed, self._device):
            self._run(operation)
        return self._peaks

    def _run(self, operation: Any) -> None:
        device = self._device(operation)
        self._note_peaks(self._inner_peaks(operation, device))
        for tensor in operation.outputs:
            memory = self._taken(operation, tensor, device)
            if memory is None:
                memory = self._new(device, self._size_of_result(operation, tensor))
            self._place(tensor, device, memory)
        self._note_peaks({})
        for tensor in _distinct(operation.inputs):
            memory = self._memories[tensor.name, device]
            self._users[memory][operation.name] -= 1
            self._free_if_unused(memory)
        for tensor in operation.outputs:
            self._free_if_unused(self._memories[tensor.name, device])

    def _place(self, tensor: Any, device: str, memory: int) -> None:
        """Assigns memory to a result, and to its copies on other devices."""
        self._memories[tensor.name, device] = memory
        if tensor.name in self._results:
            self._users[memory]["results"] += 1
        names = {op.name for op in tensor.consumers()} & self._operations.keys()
        for name in sorted(names):
            where = self._device(self._operations[name])
            if (tensor.name, where) not in self._memories:
                self._memories[tensor.name, where] = self._new(where, _size(tensor))
            self._users[self._memories[tensor.name, where]][name] += 1

    def _new(self, device: str, nbytes: int) -> int:
        self._places.append((device, nbytes))
        self._alive[device] += nbytes
        return len(self._places) - 1

    def _free_if_unused(self, memory: int) -> None:
        if not any(self._users[memory].values()):
            device, nbytes = self._places[memory]
            self._alive[device] -= nbytes
            self._places[memory] = device, 0

    def _note_peaks(self, more: Mapping[str, int]) -> None:
        for device in {*self._alive, *more}:
            now = self._alive[device] + more.get(device, 0)
            self._peaks[device] = max(self._peaks[device], now)

    def _taken(self, operation: Any, result: Any, device: str) -> int | None:
        """The memory of an input that becomes that of a result; None for new one."""
        if operation.type in _SAME_MEMORY:
            given = operation.inputs[result.value_index]
            return self._memories[given.name, device]
        if operation.type not in _IN_PLACE:
            return None
        size = self._size_of_result(operation, result)
        for tensor in operation.inputs:
            memory = self._memories[tensor.name, device]
            users = +self._users[memory]
            if [*users] == [operation.name] and self._places[memory] == (device, size):
                return memory
        return None

    def _size_of_result(self, operation: Any, tensor: Any) -> int:
        if operation.type == "ReadVariableOp":
            return 0
        if operation.type == "Placeholder" and not self._has_arguments:
            return 0
        if operation.type in _LOOPS and tensor.dtype == tf.variant:
            return _sizes_of_lists(operation)[tensor.value_index]
        return _size(tensor)

    def _inner_peaks(self, operation: Any, device: str) -> Counter[str]:
        """The most that the functions need that an operation calls."""
        found: Counter[str] = Counter()
        for attribute in _CALLED.get(operation.type, ()):
            inner = called_graph(operation, attribute)
            found |= peaks_of(inner, device, has_arguments=False)
        if operation.type in _LOOPS:
            found[device] += sum(_sizes_of_lists(operation).values())
        return found

    def _device(self, operation: Any) -> str:
        if not operation.device and operation.type in _WITH_INPUT:
            return self._device(operation.inputs[0].op)
        return (
            _short(operation.device) or self._captured.get(operation.name) or self._home
        )


def _short(name: str) -> str:
    """`/device:CPU:1` of a full name; empty without a device."""
    start = name.find("/device:")
    return name[start:] if start >= 0 else ""


def _needed(graph: Any) -> dict[str, Any]:
    """The operations that the results and effects of a graph need, by their names."""
    found: dict[str, Any] = {}
    waiting = [tensor.op for tensor in graph.outputs]
    waiting += [*graph.control_outputs, *(tensor.op for tensor in graph.inputs)]
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found[operation.name] = operation
            waiting += _before(operation)
    return found


def _before(operation: Any) -> list[Any]:
    return [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]


def _in_order(made: Sequence[Any], device_of: Callable[[Any], str]) -> Iterator[Any]:
    """Operations in the order in which they are ready, on all devices at a time.

    Args:
        made: the operations as they have been made.
        device_of: returns the device of an operation.
    """
    waits = {op.name: {each.name for each in _before(op)} for op in made}
    after: defaultdict[str, list[Any]] = defaultdict(list)
    for operation in made:
        for name in waits[operation.name]:
            after[name].append(operation)
    first = [op for op in reversed(made) if not waits[op.name]]
    ready: defaultdict[str, list[Any]] = defaultdict(list)
    # By device, the bytes that it has read and written: its time.
    clocks: Counter[str] = Counter()
    while first or any(ready.values()):
        if first:
            operation = first.pop()
        else:
            # The last that has become ready, on the device that is behind.
            device = min(
                (d for d, stack in ready.items() if stack), key=clocks.__getitem__
            )
            operation = ready[device].pop()
            tensors = [*operation.inputs, *operation.outputs]
            clocks[device] += 1 + sum(map(_size, tensors))
        yield operation
        for later in reversed(after[operation.name]):
            waits[later.name].discard(operation.name)
            if not waits[later.name]:
                where = device_of(later)
                if not ready[where]:
                    # It has waited.
                    now = clocks[device_of(operation)]
                    clocks[where] = max(clocks[where], now)
                ready[where].append(later)


def _distinct(tensors: Iterable[Any]) -> list[Any]:
    return list({tensor.name: tensor for tensor in tensors}.values())


def _size(tensor: Any) -> int:
    """Bytes of a tensor; of one of unknown shape, those of the largest input."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    count = tensor.shape.num_elements()
    if count is None:
        known = (each for each in tensor.op.inputs if each.shape.is_fully_defined())
        return max(map(_size, known), default=0)
    return int(count) * int(tensor.dtype.size)


def _sizes_of_lists(loop: Any) -> dict[int, int]:
    """Bytes of the tensors that a loop saves, one in each step, by the list's number.

    What is the same in all steps, or is in another list too, has no memory of its own.
    """
    body, found, known = called_graph(loop, "body"), {}, set()
    for number, result in enumerate(body.outputs):
        if result.dtype != tf.variant:
            continue
        found[number], saved = 0, _saved_in_step(result)
        memory = None if saved is None else _memory_in_step(saved, body)
        if memory is None or memory.name in known:
            continue
        known.add(memory.name)
        length = _length_of_list(loop.inputs[number])
        if length is None:
            raise ValueError(
                f"the loop {loop.name!r} saves a tensor in each step, and the number "
                "of its steps is not known before it runs"
            )
        found[number] = length * _size(memory)
    return found


def _saved_in_step(tensors: Any) -> Any:
    """The tensor that a step of a loop adds to a list; None without one."""
    operation = tensors.op
    while operation.type in ("Identity", *_FILLS):
        if operation.type in _FILLS:
            return operation.inputs[_FILLS[operation.type]]
        operation = operation.inputs[0].op
    return None


def _memory_in_step(tensor: Any, body: Any) -> Any:
    """The tensor with the memory of one in a loop; None if all steps have the same."""
    arguments = [each.name for each in body.inputs]
    passed: set[str] = set()
    while True:
        if tensor.op.type in _SAME_MEMORY:
            tensor = tensor.op.inputs[tensor.value_index]
        elif tensor.op.type == "ReadVariableOp" or tensor.name in passed:
            return None
        elif tensor.name in arguments:
            # The result of the step before.
            passed.add(tensor.name)
            tensor = body.outputs[arguments.index(tensor.name)]
        else:
            return tensor


def _length_of_list(tensor: Any) -> int | None:
    """The number of places in a list of tensors; None if it is unknown."""
    made = tensor.op
    if made.type == "TensorListFromTensor":
        return _as_int(made.inputs[0].shape[0])
    if made.type in _LISTS:
        return _known_number(made.inputs[1])
    if made.type == "Placeholder" or not made.inputs:
        return None
    return _length_of_list(
        made.inputs[tensor.value_index if made.type in _LOOPS else 0]
    )


def _known_number(number: Any) -> int | None:
    """The value of a tensor of a graph, as far as TensorFlow infers shapes by it."""
    if number.op.type == "TensorListLength":
        return _length_of_list(number.op.inputs[0])
    with number.graph.as_default():
        return _as_int(tf.zeros(tf.reshape(number, [1])).shape[0])


def _as_int(length: Any) -> int | None:
    return None if length is None else int(length)
