"""Variables with a copy on the device of every replica.

A mirrored variable is a `tf.Variable` on the strategy's first device, with
references to its copies on the other devices. Each assignment also updates the copies,
in eager code and in programs, so a copy is never out of date. The new values, or the
changed rows, are copied; the operation is not repeated on each copy, since sums on
accelerators that add in no fixed order would diverge.

`WithAssignments` is called after assignments of every kind. Those with
`read_value=False` are overridden here. An assignment by an operation of `tf.raw_ops`,
which takes a handle and not a variable, does not update the copies.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.gradients import without_recording
from keras_strategies.engines.tensorflow.compat.programs import (
    is_compiled_by_xla,
    without_colocation,
)
from keras_strategies.engines.tensorflow.compat.variables import (
    UnreadVariable,
    WithAssignments,
    new_variable,
    record_read,
    value_or_spec,
)
from keras_strategies.engines.tensorflow.compiled_function import refuse_xla
from keras_strategies.engines.tensorflow.replicas.captured_variables import (
    CapturedVariable,
)
from keras_strategies.engines.tensorflow.replicas.replica_reads import (
    is_in_replica_graph,
    record_as_read_of,
    replica_device,
    unrecorded_on,
)
from keras_strategies.errors import ContextError


class _Changing(threading.local):
    # The rows that the current assignment changes; None if it may change all of them.
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


class _Copies:
    """The copies of one variable, and their updates.

    Args:
        home: the device of the variable, as TensorFlow names it.
        copies: `tf.Variable`s on the other devices.
    """

    def __init__(self, home: str, copies: Sequence[tf.Variable]):
        self.home = home
        self.all = tuple(copies)
        self._of_device = {_short(copy.device): copy for copy in copies}
        # Each thread reads the variable and updates all copies under the lock, so that
        # copies are equal after concurrent assignments.
        self._update_lock = threading.Lock()

    def on(self, device: str) -> tf.Variable | None:
        """The copy on `/device:KIND:INDEX`, or None."""
        return self._of_device.get(device)

    def update(self, variable: Any, after: Any) -> Any:
        """Assigns the variable's value to all copies, after an operation.

        Args:
            variable: the variable, or the result of an assignment.
            after: the assigning operation; None if there is none to wait for.

        Returns:
            An operation that completes when all copies are updated; None in eager code.
        """
        if tf.executing_eagerly():
            with self._update_lock, without_recording():
                self._update(variable)
            return None
        self._check_program(variable)
        waiting = [] if after is None else [after]
        with (
            without_colocation(),
            tf.control_dependencies(waiting),
            without_recording(),
        ):
            updates = self._update(variable)
            # Each of them waits for the assignment.
            return updates[0] if len(updates) == 1 else tf.group(*waiting, *updates)

    def _update(self, variable: Any) -> list[Any]:
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
                    # `assign` would repeat the checks of the variable's assignment.
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
        if not is_compiled_by_xla(graph):
            return
        refuse_xla()
        devices = ", ".join([_short(self.home), *self._of_device])
        raise ContextError(
            f"Variable {variable.name!r} is mirrored on {devices} and is assigned in "
            "a function compiled by XLA (`jit_compile=True`); an XLA program runs on "
            "one device only. Compile the function with `ks.function`, which does not "
            "use XLA for several devices, or with `jit_compile=False`; or return the "
            "value from it and assign the variable outside."
        )


class _Assigned(WithAssignments):
    """Assignments of `tf.Variable`s, followed by those of their copies."""

    _copies: _Copies

    def assigned(self, operation: Any) -> Any:
        return self._copies.update(self, operation)

    def after(self, operation: Any) -> Any:
        return _Unread(self, operation)

    def count_up_to(self, limit: int) -> Any:
        before = super().count_up_to(limit)  # type: ignore[misc]
        self._copies.update(self, getattr(before, "op", None) and before)
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
        return done if read_value else self._copies.update(self, done)

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


class _Unread(_Assigned, UnreadVariable):
    """Result of an assignment: the variable, which can be assigned again."""

    def __init__(self, variable: Any, operation: Any):
        self._copies = variable._copies
        super().__init__(variable, operation)


class MirroredVariable(_Assigned, CapturedVariable):
    """A variable with a copy on each of several devices."""

    def copy_on(self, device: str) -> tf.Variable | None:
        """The copy on `/device:KIND:INDEX`, or None."""
        return self._copies.on(device)

    @property
    def copies(self) -> tuple[tf.Variable, ...]:
        """tuple of `tf.Variable`, the copies on the other devices."""
        return self._copies.all

    def value_on(self, device: str) -> Any:
        own = self.copy_on(device)
        return None if own is None else own.value()

    def _copy_to_read(self) -> tf.Variable | None:
        """The copy that this thread reads; None for the variable itself."""
        device = replica_device()
        return None if device is None else self._copies.on(device)

    def replica_value(self) -> Any:
        own = self._copy_to_read()
        if own is None:
            return None
        record_read(self)
        with unrecorded_on(own.device):
            value = own.read_value()
        record_as_read_of(self, value, lambda gradient: gradient)
        return value

    def sparse_read(self, indices: Any, name: str | None = None) -> Any:
        own = self._copy_to_read()
        if own is None or not is_in_replica_graph():
            # In a loop or a branch, where the indices may be computed.
            return super().sparse_read(indices, name)
        record_read(self)
        with unrecorded_on(own.device):
            indices = tf.identity(indices)
            rows = own.sparse_read(indices, name)

        def gradient_of(rows_gradient: Any) -> tf.IndexedSlices:
            shape = self.shape.as_list()
            return tf.IndexedSlices(
                tf.reshape(rows_gradient, [-1, *shape[1:]]),
                tf.reshape(indices, [-1]),
                tf.constant(shape, tf.int32),
            )

        record_as_read_of(self, rows, gradient_of)
        return rows

    def exported(self, tensor_map: Any) -> list[Any]:
        # A loaded variable has no copies: their handles become that of the variable.
        for copy in self.copies:
            tensor_map[copy.handle] = tensor_map[self.handle]
        return [copy.handle for copy in self.copies]


def mirror(
    variable: tf.Variable,
    devices: Sequence[str],
    creating: Callable[[str], contextlib.AbstractContextManager[Any]],
) -> None:
    """Converts a new plain variable to a mirrored one.

    Args:
        variable: `tf.Variable`, not yet used in a program.
        devices: the devices of the copies, as TensorFlow names them.
        creating: a context in which variables are created on a device.
    """
    copies = []
    name = variable.name.split(":")[0]
    for device in devices:
        with creating(device):
            value = value_or_spec(variable)
            copies.append(new_variable(value, False, f"{name}_copy"))
    variable._copies = _Copies(variable.device, copies)
    variable.__class__ = MirroredVariable


def _short(device: str) -> str:
    """`/device:CPU:1` of `/job:localhost/replica:0/task:0/device:CPU:1`."""
    return device[device.index("/device:") :]
