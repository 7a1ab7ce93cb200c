"""Variables with a copy on the device of every replica.

A mirrored variable is a `tf.Variable` on the strategy's first device, with
references to its copies on the other devices. Each assignment updates them at once, in
eager code and in programs, so that a copy is never older than the variable. They get
the values, or the rows, that the variable has afterwards, and do not repeat the
operation: copies that each do their own sums would drift apart where an accelerator
adds in no fixed order.

`compat.WithAssignments` sees assignments of all kinds. Those that read nothing back are
overridden here. Operations of `tf.raw_ops` take a handle
and not a variable; an assignment by one of them is not seen.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow import compat
from keras_strategies.engines.tensorflow.compiled_function import refuse_xla
from keras_strategies.errors import ContextError


class _Changing(threading.local):
    # The rows that the assignment under way changes; None if it may be all of them.
    rows: Any = None


_changing = _Changing()


@contextlib.contextmanager
def _changing_rows(sparse_delta: Any) -> Iterator[None]:
    previous = _changing.rows
    _changing.rows = getattr(sparse_delta, "indices", None)
    try:
        yield
    finally:
        _changing.rows = previous


class _Reading(threading.local):
    # The device whose copies this thread reads, and the graph that its replica
    # builds; None where it reads the variables themselves, and in eager code.
    device: str | None = None
    graph: Any = None


_reading = _Reading()


@contextlib.contextmanager
def reading_copies_on(device: str) -> Iterator[None]:
    """In this thread, variables that have a copy on the device are read there.

    Args:
        device: as TensorFlow names it, `/device:KIND:INDEX`.
    """
    previous = _reading.device, _reading.graph
    _reading.device, _reading.graph = device, _current_graph()
    try:
        yield
    finally:
        _reading.device, _reading.graph = previous


class _Copies:
    """The copies of one variable, and how they are brought up to date.

    Args:
        home: the device of the variable, as TensorFlow names it.
        copies: `tf.Variable`s on the other devices.
    """

    def __init__(self, home: str, copies: Sequence[tf.Variable]):
        self.home = home
        self.all = tuple(copies)
        self._of_device = {_short(copy.device): copy for copy in copies}
        # Of two threads that assign at once, the last one here copies both.
        self._one_at_a_time = threading.Lock()

    def on(self, device: str) -> tf.Variable | None:
        """The copy on `/device:KIND:INDEX`, None where there is none."""
        return self._of_device.get(device)

    def renew(self, variable: Any, after: Any) -> Any:
        """Assigns the variable's value to all copies, after an operation.

        Args:
            variable: the variable, or the result of an assignment.
            after: the operation that has assigned it; None if it is done.

        Returns:
            An operation that ends when all copies are renewed; None in eager code.
        """
        if tf.executing_eagerly():
            with self._one_at_a_time, compat.without_recording():
                self._renew(variable)
            return None
        self._check_program(variable)
        waiting = [] if after is None else [after]
        with (
            compat.without_colocation(),
            tf.control_dependencies(waiting),
            compat.without_recording(),
        ):
            renewed = self._renew(variable)
            # Each of them waits for the assignment.
            return renewed[0] if len(renewed) == 1 else tf.group(*waiting, *renewed)

    def _renew(self, variable: Any) -> list[Any]:
        rows = _changing.rows
        raw, handle, dtype = tf.raw_ops, variable.handle, variable.dtype
        done = []
        with tf.device(self.home):
            if rows is None:
                value = raw.ReadVariableOp(resource=handle, dtype=dtype)
            else:
                value = raw.ResourceGather(resource=handle, indices=rows, dtype=dtype)
        for copy in self.all:
            with tf.device(copy.device):
                if rows is None:
                    # `assign` would check again what the variable has checked.
                    done.append(raw.AssignVariableOp(resource=copy.handle, value=value))
                else:
                    done.append(
                        raw.ResourceScatterUpdate(
                            resource=copy.handle, indices=rows, updates=value
                        )
                    )
        return done

    def _check_program(self, variable: Any) -> None:
        graph = tf.compat.v1.get_default_graph()
        if not compat.is_compiled_by_xla(graph):
            return
        refuse_xla()
        devices = ", ".join([_short(self.home), *self._of_device])
        raise ContextError(
            f"Variable {variable.name!r} is mirrored on {devices} and is assigned in "
            "a function that XLA compiles (`jit_compile=True`); an XLA program reaches "
            "one device only. Compile the function with `ks.function`, which does "
            "without XLA here, or with `jit_compile=False`; or return the value from "
            "it and assign the variable outside."
        )


class _Assigned(compat.WithAssignments):
    """Assignments of `tf.Variable`s, followed by those of their copies."""

    _copies: _Copies

    def assigned(self, operation: Any) -> Any:
        return self._copies.renew(self, operation)

    def after(self, operation: Any) -> Any:
        return _Unread(self, operation)

    def count_up_to(self, limit: int) -> Any:
        before = super().count_up_to(limit)  # type: ignore[misc]
        self._copies.renew(self, getattr(before, "op", None) and before)
        return before


def _without_reading(name: str) -> Callable[..., Any]:
    def method(
        self: Any,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        original = getattr(super(_Assigned, self), method.__name__)
        done = original(value, use_locking, name, read_value)
        return done if read_value else self._copies.renew(self, done)

    method.__name__ = name
    return method


def _by_rows(name: str) -> Callable[..., Any]:
    def method(
        self: Any, sparse_delta: Any, use_locking: bool = False, name: str | None = None
    ) -> Any:
        original = getattr(super(_Assigned, self), method.__name__)
        with _changing_rows(sparse_delta):
            return original(sparse_delta, use_locking, name)

    method.__name__ = name
    return method


for _name in ("assign", "assign_add", "assign_sub"):
    setattr(_Assigned, _name, _without_reading(_name))
for _name in ("add", "sub", "mul", "div", "min", "max", "update"):
    setattr(_Assigned, f"scatter_{_name}", _by_rows(f"scatter_{_name}"))


class _Unread(_Assigned, compat.UnreadVariable):
    """Result of an assignment: the variable, which can be assigned again."""

    def __init__(self, variable: Any, operation: Any):
        self._copies = variable._copies
        super().__init__(variable, operation)


class MirroredVariable(_Assigned, compat.ResourceVariable):
    """A variable with a copy on each of several devices.

    Plain variables of TensorFlow are composite tensors, which `tf.nest` and
    `tf.function` take apart into a handle and put together again, as variables
    without copies. This one stays in one piece; programs capture it.
    """

    def copy_on(self, device: str) -> tf.Variable | None:
        """The copy on `/device:KIND:INDEX`; None where there is none."""
        return self._copies.on(device)

    @property
    def copies(self) -> tuple[tf.Variable, ...]:
        """tuple of `tf.Variable`, the copies on other devices than its own."""
        return self._copies.all

    def _own(self) -> tf.Variable | None:
        """The copy that this thread is to read; None for the variable itself."""
        if _reading.device is None:
            return None
        if _reading.graph is None and not tf.executing_eagerly():
            # In a program that all replicas may call, it cannot be one replica's.
            return None
        return self._copies.on(_reading.device)

    def replica_value(self) -> Any:
        own = self._own()
        if own is None:
            return None
        compat.record_read(self)
        with _beside_tapes(own.device):
            value = own.read_value()
        _say_it_was_read(self, value, lambda gradient: gradient)
        return value

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        own = self._own()
        if own is None or _current_graph() is not _reading.graph:
            # In a loop or a branch the rows may be chosen there.
            return super().sparse_read(indices, name)
        compat.record_read(self)
        with _beside_tapes(own.device):
            indices = tf.identity(indices)
            rows = own.sparse_read(indices, name)

        def gradient_of(rows_gradient: Any) -> tf.IndexedSlices:
            shape = self.shape.as_list()
            return tf.IndexedSlices(
                tf.reshape(rows_gradient, [-1, *shape[1:]]),
                tf.reshape(indices, [-1]),
                tf.constant(shape, tf.int32),
            )

        _say_it_was_read(self, rows, gradient_of)
        return rows

    def __tf_tracing_type__(self, context: Any) -> _Itself:
        return _Itself(self, compat.handle_alias(self, context))

    def exported(self, tensor_map: Any) -> list[Any]:
        # Where it is loaded it has no copies: what assigns them assigns it again.
        for copy in self.copies:
            tensor_map[copy.handle] = tensor_map[self.handle]
        return [copy.handle for copy in self.copies]


@contextlib.contextmanager
def _beside_tapes(device: str) -> Iterator[None]:
    """Operations on a device, in the graph of the replica, that no tape records.

    A read in a loop or a branch is made before it: gradients in there follow
    operations, and would end at the handle of the copy.
    """
    graph = _reading.graph
    with (
        contextlib.nullcontext() if graph is None else graph.as_default(),
        compat.without_recording(),
        tf.device(device),
    ):
        yield


def _say_it_was_read(
    variable: Any, value: Any, gradient_of: Callable[[Any], Any]
) -> None:
    """Lets tapes take a value that was read from a copy for the variable's."""
    compat.record_operation(
        "ReadVariableOp",
        [value],
        [variable.handle],
        lambda gradient: [gradient_of(gradient)],
    )


class _Itself(tf.types.experimental.TraceType):  # type: ignore[misc]
    """As an argument of a `tf.function`, a mirrored variable is itself and no other."""

    def __init__(self, variable: MirroredVariable, alias: Any):
        self._variable = weakref.ref(variable)
        self._id = id(variable)
        # The same for all arguments of a call that are the variable: they are one.
        self._alias = alias

    def is_subtype_of(self, other: Any) -> bool:
        return self == other

    def most_specific_common_supertype(self, others: Sequence[Any]) -> _Itself | None:
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        variable = self._variable()
        assert variable is not None
        if not placeholder_context.unnest_only:
            # TensorFlow looks for the handle of an argument among the captures.
            placeholder_context.context_graph.capture(variable.handle)
        return variable

    def to_tensors(self, value: Any) -> list[Any]:
        return [value.handle]

    def flatten(self) -> list[Any]:
        return compat.handle_specs(self._alias)

    def cast(self, value: Any, cast_context: Any) -> Any:
        return value

    def __hash__(self) -> int:
        return hash(self._id)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Itself)
            and self._variable() is other._variable()
            and self._alias == other._alias
        )


def mirror(
    variable: tf.Variable,
    devices: Sequence[str],
    creating: Callable[[str], contextlib.AbstractContextManager[Any]],
) -> None:
    """Makes an unused plain variable a mirrored one.

    Args:
        variable: `tf.Variable` that has a value, outside of programs.
        devices: the devices of the copies, as TensorFlow names them.
        creating: a context in which variables are made on a device.
    """
    copies = []
    name = variable.name.split(":")[0]
    for device in devices:
        with creating(device):
            value = variable.read_value()
            copies.append(tf.Variable(value, trainable=False, name=f"{name}_copy"))
    variable._copies = _Copies(variable.device, copies)
    variable.__class__ = MirroredVariable


def _current_graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _short(device: str) -> str:
    """`/device:CPU:1` of `/job:localhost/replica:0/task:0/device:CPU:1`."""
    return device[device.index("/device:") :]
