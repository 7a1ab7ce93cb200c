"""One layer call on replicas of one graph, with a gradient tape for each replica."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.gradients import (
    graph_gradients,
    is_any_tape_active,
    is_persistent,
    is_recorded,
    record_gradient,
    without_recording,
)
from keras_strategies.engines.tensorflow.compat.programs import functions_copied
from keras_strategies.engines.tensorflow.data_parallel.assigned_values import (
    assigned_value,
)
from keras_strategies.engines.tensorflow.data_parallel.custom_gradient import (
    custom_gradient,
)
from keras_strategies.engines.tensorflow.data_parallel.graph_copies import ReplicaTraces
from keras_strategies.engines.tensorflow.data_parallel.row_parts import (
    for_tapes,
    own_rows,
)
from keras_strategies.engines.tensorflow.devices import tf_device
from keras_strategies.engines.tensorflow.random_numbers.intercepted_draws import (
    replica_draws,
)
from keras_strategies.engines.tensorflow.replicas.captured_variables import (
    CapturedVariable,
)
from keras_strategies.engines.tensorflow.replicas.lockstep_replicas import (
    LockstepCollectives,
    NestedCollectiveError,
    ReplicaEngine,
)
from keras_strategies.engines.tensorflow.sharding.gather_schedule import GatherSchedule
from keras_strategies.engines.tensorflow.sharding.shard_gradients import (
    set_parts,
    sums_of_parts,
)
from keras_strategies.engines.tensorflow.sharding.variables_in_shards import (
    VariableInShards,
)
from keras_strategies.keras_compat.models.layers import get_logits
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.rows.row_placements import SAME, RowKind
from keras_strategies.runtime import context
from keras_strategies.runtime.data_parallel.call_on_replicas import recomputed
from keras_strategies.runtime.data_parallel.gradient_boundary import (
    BackwardPass,
    GradientBoundary,
    GradientTarget,
    combined,
)
from keras_strategies.runtime.data_parallel.replica_executor import (
    CallOnReplica,
    ForwardPass,
    NotOnReplicasError,
    ReplicaExecutor,
)
from keras_strategies.runtime.data_parallel.row_parts import parts_of
from keras_strategies.runtime.data_parallel.split_plan import (
    Channel,
    OutputActivation,
    SplitPlan,
)
from keras_strategies.runtime.random_numbers.row_draws import OwnRows
from keras_strategies.runtime.replica_context import ReplicaContext
from keras_strategies.runtime.replicas.tensor_primitives import is_float
from keras_strategies.runtime.state.replica_state import (
    AddedState,
    CallState,
    ReplicaResult,
    ReplicaState,
)

#: Operations whose input Keras's losses use in a program.
_ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "Sigmoid": lambda logits: tf.raw_ops.Sigmoid(x=logits),
    "Softmax": lambda logits: tf.raw_ops.Softmax(logits=logits),
}


class CallInLockstep(ReplicaExecutor):
    """The replicas of one layer call, from its first slice to its backward pass.

    Args:
        plan: the plan of the call.
        engine: the replicas' threads.
    """

    def __init__(self, plan: SplitPlan, engine: ReplicaEngine):
        self.plan = plan
        self._engine = engine
        self._row_split = plan.row_split
        self.sizes = plan.row_split.sizes
        count = len(self.sizes)
        placement = plan.strategy.placement
        replicas = placement.replicas[:count]
        self._devices = [tf_device(device) for device in replicas]
        self._lead_name = tf_device(placement.variables)
        self.slices: list[list[Any]] = [[] for _ in range(count)]
        self.tapes: list[Any] = [None] * count
        # By replica: ids of slices and copies of variables that the tape watches.
        self.watched: list[set[int]] = [set() for _ in range(count)]
        # Values of variables that all replicas read.
        self._reads: dict[int, Any] = {}
        # The replicas with tapes that have computed gradients.
        self._used_tapes: set[int] = set()
        self._zeros: dict[Any, tuple[Any, Any]] = {}
        self._is_static = all(isinstance(size, int) for size in self.sizes)
        self._all_have_rows = self._is_static or plan.row_split.all_have_rows
        self.traces = ReplicaTraces(self._devices, self.slices, self._local_value)
        self._collectives = LockstepCollectives(
            replicas,
            placement.variables,
            plan.row_split.replica_set,
            copied_exchange=self.traces.exchange,
        )
        self._gathers = GatherSchedule()
        self.graph = tf.compat.v1.get_default_graph()
        self._is_eager = tf.executing_eagerly()

    @property
    def is_eager(self) -> bool:
        return self._is_eager

    # Replicas.

    def forward(self, tensors: Sequence[Any], call: CallOnReplica) -> ForwardPass:
        slices = [self.split(tensor) for tensor in tensors]
        tasks = [
            self._task(i, [parts[i] for parts in slices], call)
            for i in range(len(self.sizes))
        ]
        self._open_tapes()
        try:
            results = self._run(lambda i: self._forward(i, tasks[i]))
        except NestedCollectiveError as error:
            raise NotOnReplicasError(
                "calls a collective of the replicas in a loop or a branch, for example "
                "by batch normalization, which TensorFlow does not support",
                "Move the collective out of the loop",
            ) from error
        self._gathers.order()
        columns = list(zip(*(result.leaves for result in results), strict=True))
        if not self._is_static:
            self._check_rows(columns)
        return ForwardPass(
            results,
            slices,
            [id(parts[0]) in self.watched[0] for parts in slices],
            [
                {
                    key: pair
                    for key, pair in result.state.reads.items()
                    if id(pair[1]) in watched
                }
                for result, watched in zip(results, self.watched, strict=True)
            ],
            {
                i: activation
                for i, parts in enumerate(columns)
                if (activation := _activation_of(parts)) is not None
            },
        )

    def _check_rows(self, columns: Sequence[Sequence[Any]]) -> None:
        """Adds checks of the rows of outputs to a program for any number of rows."""
        message = (
            "A layer called on several replicas returned a tensor with another number "
            "of rows than its input, so its outputs cannot be concatenated. "
            "Return one row per sample."
        )
        placements = self.plan.proof.of_outputs(len(columns))
        for parts, placement in zip(columns, placements, strict=False):
            placement = placement or SAME
            if placement.kind is not RowKind.ROWS or not tf.is_tensor(parts[0]):
                continue
            for part, size in zip(parts, self.sizes, strict=True):
                rows, expected = tf.shape(part)[0], size * placement.multiple
                tf.debugging.Assert(tf.equal(rows, expected), [message, rows, expected])

    def _task(
        self, replica_id: int, slices: Sequence[Any], call: CallOnReplica
    ) -> Callable[[], ReplicaResult]:
        rows = self._rows(replica_id) if self.plan.proof.draws else None

        def run() -> ReplicaResult:
            with replica_draws():
                return call(slices, self._replica_state(replica_id), rows)

        return run

    def split(self, tensor: Any) -> list[Any]:
        """Slices of a tensor along axis 0, each on its replica's device."""
        parts = []
        pieces = parts_of(tensor, self._row_split)
        if pieces is None:
            own = self._row_split.own(self._of_all_rows(tensor))
            pieces = tf.split(own, self.sizes) if len(self.sizes) > 1 else [own]
        for i, part in enumerate(pieces):
            with tf.device(self._devices[i]):
                # Inside the gradient boundary, which begins with the slices.
                parts.append(tf.identity(tf.stop_gradient(part)))
            self.slices[i].append(parts[-1])
        return parts

    def _of_all_rows(self, tensor: Any) -> Any:
        """The tensor, with a check of its rows in a program for any number of rows.

        A worker would else take other rows of a tensor of another length.
        """
        if self._is_static:
            return tensor
        layer = self.plan.layer_call.layer
        with tf.device("CPU:0"):
            rows, found = sum(self._row_split.every), tf.shape(tensor)[0]
            message = (
                f"{layer.name!r} was called with tensors of different numbers of rows, "
                "in a program for any number of rows. Their lengths are unknown when "
                "it is traced, so all are divided over the replicas alike. Give "
                "batches a fixed size, or compute this outside of layers and losses."
            )
            check = tf.debugging.Assert(tf.equal(found, rows), [message, found, rows])
        with tf.control_dependencies([check]):
            return tf.identity(tensor)

    def _run(self, task: Callable[[int], Any]) -> list[Any]:
        """Runs a task on each replica, in its context; results in order."""
        counts = self._row_split.replica_set.counts

        def in_context(replica_id: int) -> Callable[[], Any]:
            replica = ReplicaContext(
                self.plan.strategy,
                counts.first + replica_id,
                self._collectives,
                counts.total,
                functools.partial(self.traces.note_read, replica_id),
            )

            def run() -> Any:
                with context.on_replica(replica):
                    return task(replica_id)

            return run

        tasks = [in_context(i) for i in range(len(self.sizes))]
        return self._engine.run(tasks, self._collectives)

    def _open_tapes(self) -> None:
        """Records the replicas, unless no tape can need a gradient."""
        if tf.executing_eagerly() and not is_any_tape_active():
            return
        # Under a persistent tape TensorFlow traces the gradient of a loop three times
        # when the loop is created. In a graph, second gradients come from the graph
        # (`_gradients_of_replica`), so its tapes are not persistent.
        options = {"persistent": self._is_eager, "watch_accessed_variables": False}
        self.tapes = [tf.GradientTape(**options) for _ in self.sizes]
        for watched, slices in zip(self.watched, self.slices, strict=True):
            watched.update(id(part) for part in slices if is_float(part))

    def _close_tapes(self) -> None:
        """Drops the tapes of a graph in which no outer tape needs gradients.

        A tape refers to tensors, these to the graph, and the boundary in the graph to
        this call: a cycle that the garbage collector cannot traverse. Gradients that
        are computed later, as by a tape around the function, come from the graph.
        """
        if not tf.executing_eagerly() and not is_any_tape_active():
            self.tapes = [None] * len(self.sizes)

    def _forward(self, i: int, task: Callable[[], ReplicaResult]) -> ReplicaResult:
        """Calls the layer on a replica, or copies the trace of another replica."""
        tape = self.tapes[i]
        if (template := self.traces.template(i)) is not None:
            result = self.traces.copied_forward(template, i)
            reads = template.result.state.reads.items()
            self.watched[i].update(
                id(result.state.reads[key][1])
                for key, (_, local) in reads
                if id(local) in self.watched[template.replica_id]
            )
            return result
        with tape or contextlib.nullcontext():
            if tape is not None:
                tape.watch([s for s in self.slices[i] if is_float(s)])
            if tf.executing_eagerly():
                # A trace of a `tf.function` has captured the values of a step.
                with functions_copied():
                    return task()
            used = self._collectives.was_used_by
            with functions_copied(), self.traces.tracing(i, used) as trace:
                trace.result = task()
                return trace.result

    # Random numbers.

    def _rows(self, replica_id: int) -> OwnRows:
        """The rows of a replica, in a call that draws random numbers."""
        rows = self.plan.own_rows(replica_id)
        if tf.executing_eagerly():
            return rows

        # Inputs of a replica's operations, so that copies of these have other ones.
        def as_input(count: Any) -> Any:
            return tf.identity(tf.cast(count, tf.int64))

        own, total = rows.own, rows.total
        with tf.device("CPU:0"):
            if not self._is_static:
                own, total = as_input(own), as_input(total)
            rows = OwnRows(as_input(rows.before), own, total)
        self.traces.rows[replica_id] = rows
        return rows

    # Variables.

    def _replica_state(self, replica_id: int) -> CallState:
        """The variables of a local replica."""
        if self.plan.layer_call.only_adds:
            return AddedState()
        if self.plan.layer_call.adds:
            return ReplicaState(zeros_of)
        return ReplicaState(
            lambda variable: self._copy_variable(replica_id, variable),
            lambda value, dtype: self._cast_copy(replica_id, value, dtype),
            self._assigned_value,
        )

    def _copy_variable(self, replica_id: int, variable: Any) -> Any:
        raw = raw_value(variable)
        if raw is None:
            return None
        tape = self.tapes[replica_id]
        with self._outside_control_flow():
            local = self.traces.read(replica_id, variable, raw)
        # Not there: tapes do not watch in `tf.init_scope`.
        if tape is not None and self._is_trained(variable, raw):
            tape.watch(local)
            self.watched[replica_id].add(id(local))
        return local

    def _assigned_value(
        self, variable: Any, read: Callable[[], Any], value: Any
    ) -> Any:
        if not self._is_trained(variable, raw_value(variable)):
            return tf.stop_gradient(value)
        return assigned_value(read(), value)

    def _cast_copy(self, replica_id: int, value: Any, dtype: str) -> Any:
        tape = self.tapes[replica_id]
        is_watched = tape is not None and id(value) in self.watched[replica_id]
        # Not in a loop: each iteration casts there, and the sum over iterations is
        # float32.
        if not is_watched or not self._is_current_graph:
            return None
        with tape.stop_recording(), tf.device(self._devices[replica_id]):
            cast = tf.cast(value, dtype)
        tape.watch(cast)
        self.watched[replica_id].add(id(cast))
        return cast

    def _is_trained(self, variable: Any, raw: Any) -> bool:
        """Whether a gradient of a variable may be needed.

        Tapes also compute gradients of frozen variables, which are dropped. That costs
        nothing in one process, but several workers would exchange them.
        """
        if self._row_split.workers is not None and not variable.trainable:
            return False
        return bool(raw.trainable) and is_float(raw)

    def _local_value(self, replica_id: int, variable: Any, raw: Any) -> Any:
        """The value that a replica computes with, on its device."""
        device = self._devices[replica_id]
        # Not recorded by tapes: gradients of variables cross the boundary by `targets`.
        with without_recording():
            own = raw.value_on(device) if isinstance(raw, CapturedVariable) else None
            if own is not None:
                if isinstance(raw, VariableInShards) and not self._is_eager:
                    self._gathers.add(replica_id, raw, device, own)
                return own
            value = self._read(raw)
            if device == self._lead_name:
                return value
            with tf.device(device):
                return tf.identity(value)

    def _outside_control_flow(self) -> Any:
        """The call's own graph: a copy first read in a loop is made before the loop.

        In an eager call, a copy that a `tf.function` reads is made outside of that.
        """
        return tf.init_scope() if self._is_eager else self.graph.as_default()

    @property
    def _is_current_graph(self) -> bool:
        """Whether no loop, branch or program was entered since the call began."""
        return tf.executing_eagerly() or (
            tf.compat.v1.get_default_graph() is self.graph
        )

    def _read(self, raw: Any) -> Any:
        """The value of a variable, read once for all replicas."""
        if id(raw) not in self._reads:
            with self.plan.on_lead():
                self._reads[id(raw)] = tf.convert_to_tensor(raw)
        return self._reads[id(raw)]

    # The boundary.

    def _of_worker(self, target: GradientTarget) -> Any:
        """The tensor of a target with this worker's rows.

        Their gradients are gathered to the global batch where a tape needs them.
        """
        if not target.by_rows or target.as_row_parts is not None:
            return target.tensor
        with self.plan.on_lead():
            return own_rows(self._row_split, target.tensor)

    def connect(self, boundary: GradientBoundary) -> list[Any]:
        tensors = list(map(self._of_worker, boundary.targets))
        if any(channel.is_in_parts for channel in boundary.channels) or any(
            target.as_row_parts is not None for target in boundary.targets
        ):
            return self._connect_parts(boundary, tensors)

        @custom_gradient
        def connected(*tensors: Any) -> Any:
            def grad(*gradients: Any) -> list[Any]:
                return self._gradients(boundary, gradients)

            return boundary.combined(), grad

        found = list(connected(*tensors))
        self._close_tapes()
        return found

    def _connect_parts(
        self, boundary: GradientBoundary, targets: Sequence[Any]
    ) -> list[Any]:
        """The same, where outputs or inputs stay on their replicas."""
        channels = boundary.channels
        with without_recording():
            columns = [
                [for_tapes(part) for part in channel.parts]
                if channel.is_in_parts
                else [for_tapes(combined(self.plan, channel))]
                for channel in channels
            ]

        def grad(*gradients: Any) -> list[Any]:
            left = iter(gradients)
            given = [list(itertools.islice(left, len(column))) for column in columns]
            return self._gradients(boundary, self._of_columns(channels, given))

        tensors = [tensor for column in columns for tensor in column]
        record_gradient(tensors, targets, grad)
        self._close_tapes()
        return self._of_columns(channels, columns)

    def _of_columns(
        self, channels: Sequence[Channel], columns: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """The tensor of each channel, from its parts or from itself."""
        return [
            self.plan.as_row_parts(column, channel.multiple)
            if channel.is_in_parts
            else column[0]
            for channel, column in zip(channels, columns, strict=True)
        ]

    def _gradients(
        self, boundary: GradientBoundary, gradients: Sequence[Any]
    ) -> list[Any]:
        """Gradients of the targets of a boundary, from those of its channels."""
        targets = boundary.targets
        if is_recorded([*gradients, *(target.tensor for target in targets)]):
            return self._differentiable_gradients(boundary, gradients)
        shares = boundary.shares(gradients)
        present = [share for share in shares if share is not None]
        is_in_program = self._is_current_graph and not self._is_eager
        start = self.graph.num_operations() if is_in_program else 0
        self.traces.set_given(present)
        tasks = [
            functools.partial(self._backward, i, each)
            for i, each in enumerate(boundary.backward(shares))
        ]
        results = self._run(lambda i: self.traces.backward(i, tasks[i]))
        pairs = zip(targets, boundary.columns(results), strict=True)
        with self.plan.on_lead():
            columns = [
                column
                if target.by_rows
                else [self._counted(i, part) for i, part in enumerate(column)]
                for target, column in pairs
            ]
        found = self._sums(boundary, columns)
        if is_in_program:
            first = present[0] if present else ()
            begins = {i: part.op for i, part in enumerate(first)}
            self._gathers.gather_again(start, begins)
        return found

    def _sums(
        self, boundary: GradientBoundary, columns: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """The gradients of the targets, those of variables in shards by shards."""
        in_shards, given, ops = {}, list(columns), self.plan.ops
        with self.plan.on_lead():
            pairs = zip(boundary.targets, columns, strict=True)
            for i, (target, column) in enumerate(pairs):
                variable = self._shards_of(target, column)
                if variable is not None:
                    parts = sums_of_parts(ops, variable, column, self._devices)
                    in_shards[i] = [target.rounded(ops, part) for part in parts]
                    given[i] = [variable.grid.join(parts, tf.concat)]
        found = boundary.sums(given)
        for i, parts in in_shards.items():
            set_parts(found[i], parts)
        return found

    def _shards_of(
        self, target: GradientTarget, gradients: Sequence[Any]
    ) -> VariableInShards | None:
        """The variable of a target with gradients that are summed shard by shard."""
        raw = None if target.variable is None else raw_value(target.variable)
        present = [part for part in gradients if part is not None]
        if (
            not (present and isinstance(raw, VariableInShards))
            or any(isinstance(part, tf.IndexedSlices) for part in present)
            or target.is_overwritten
            or self._row_split.workers is not None
        ):
            return None
        return raw

    def _backward(self, i: int, backward: BackwardPass) -> list[Any]:
        """The gradients of a replica's tensors, in its context."""
        # From the replica's tape; a second time, from the graph.
        tape, sources = self.tapes[i], backward.sources
        targets = [part for part, _ in backward.outputs]
        given = [share for _, share in backward.outputs]
        if tape is None or (i in self._used_tapes and not is_persistent(tape)):
            found = graph_gradients(targets, sources, given, self.graph)
        else:
            found = tape.gradient(targets, sources, output_gradients=given)
        self._used_tapes.add(i)
        for gradient, source in zip(found, sources, strict=True):
            if isinstance(gradient, tf.Tensor):
                # Some operations lose it, and packs are made of known shapes.
                gradient.set_shape(source.shape)
        return list(found)

    def _counted(self, replica_id: int, gradient: Any) -> Any:
        """The gradient of a variable on a replica; zeros of a replica without rows."""
        if self._all_have_rows or not isinstance(gradient, tf.Tensor):
            return gradient
        graph = tf.compat.v1.get_default_graph()
        # One operation for each tensor: a model has hundreds of gradients.
        key = id(graph), replica_id, gradient.dtype
        if key not in self._zeros:
            self._zeros[key] = self.sizes[replica_id] > 0, tf.zeros([], gradient.dtype)
        has_rows, zero = self._zeros[key]
        return tf.raw_ops.SelectV2(condition=has_rows, t=gradient, e=zero)

    def _differentiable_gradients(
        self, boundary: GradientBoundary, gradients: Sequence[Any]
    ) -> list[Any]:
        """The same gradients, of operations that an outer tape can record."""
        targets = boundary.targets
        values: dict[int, Any] = {}
        inputs = [target.tensor for target in targets if target.by_rows]
        trained = {id(s.variable) for s in targets if s.variable is not None}

        def value_of(variable: Any) -> Any:
            raw = raw_value(variable)
            if id(variable) not in trained:
                return raw
            values[id(variable)] = tf.convert_to_tensor(raw)
            tape.watch(values[id(variable)])
            return values[id(variable)]

        with self.plan.on_lead():
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(inputs)
                found = recomputed(boundary, value_of, self._assigned_value)
                outputs = [output for output in found if is_float(output)]
            wanted = [*values.values(), *inputs]
            results = tape.gradient(outputs, wanted, output_gradients=list(gradients))
            # A variable is several sources where each of its reads has a gradient.
            of_variables = dict(zip(values, results, strict=False))
            of_inputs = iter(results[len(values) :])
            returned = []
            for target in targets:
                if target.by_rows:
                    gradient = next(of_inputs)
                else:
                    gradient = of_variables.pop(id(target.variable), None)
                if gradient is not None and gradient.dtype != target.tensor.dtype:
                    gradient = tf.cast(gradient, target.tensor.dtype)
                if (
                    gradient is not None
                    and target.by_rows
                    and target.as_row_parts is None
                ):
                    gradient = own_rows(self._row_split, gradient)
                returned.append(gradient)
            return returned


def zeros_of(variable: Any) -> Any:
    """Zeros in the place of a variable."""
    raw = raw_value(variable)
    return None if raw is None else tf.zeros(raw.shape, raw.dtype)


def _activation_of(parts: Sequence[Any]) -> OutputActivation | None:
    """The activation of an output of the replicas, from which losses take logits."""
    if all(_operation(part) in _ACTIVATIONS for part in parts):
        apply = _ACTIVATIONS[_operation(parts[0])]
        return OutputActivation([part.op.inputs[0] for part in parts], apply)
    logits = [get_logits(part) for part in parts]
    are_known = all(each is not None for each in logits)
    return OutputActivation(logits, None) if are_known else None


def _operation(tensor: Any) -> str:
    """The type of the operation of a tensor in a program; empty of an eager one."""
    has_operation = isinstance(tensor, tf.Tensor) and not hasattr(tensor, "numpy")
    return str(tensor.op.type) if has_operation else ""
