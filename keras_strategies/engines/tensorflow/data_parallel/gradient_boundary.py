"""The boundary between the global batch and the replicas that compute it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.engines.tensorflow import compat
from keras_strategies.engines.tensorflow.data_parallel.custom_gradient import (
    custom_gradient,
)
from keras_strategies.engines.tensorflow.data_parallel.gradient_sums import (
    in_dtype_of,
    sums_of,
    sums_over_workers,
    widened,
)
from keras_strategies.engines.tensorflow.data_parallel.graph_copies import (
    ReplicaOfAny,
    ReplicaTraces,
)
from keras_strategies.engines.tensorflow.replicas.lockstep_replicas import (
    LockstepCollectives,
)
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.data_parallel.layer_call import (
    Channel,
    ReplicaResult,
)
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.replicas.replica_set import RowSplit


class ReplicaCaller(Protocol):
    """What a call on replicas needs of the object that makes it."""

    lead: str
    devices: list[str]
    placement: Placement
    reduction: LocalReduction | None

    def local_value(self, replica_id: int, variable: Any, raw: Any) -> Any: ...

    def recompute(
        self, layer_call: Any, value_of: Callable[[Any], Any]
    ) -> list[Any]: ...

    def run_tasks(
        self, job: LayerCallOnReplicas, tasks: Sequence[Callable[[], Any]]
    ) -> list[Any]: ...


@dataclass
class _GradientTarget:
    """A tensor outside the replicas that gradients go to.

    Args:
        tensor: the variable's value, or an input of the layer.
        locals: what the replicas computed with instead: their copies of the
            variable (None where a replica did not read it) or their slices.
        by_rows: bool, whether gradients are concatenated, as for an input, or
            summed, as for a variable.
        variable: the Keras variable, None for an input.
    """

    tensor: Any
    locals: list[Any]
    by_rows: bool
    variable: Any = None


@dataclass
class LayerCallOnReplicas:
    """One data-parallel call, from its first slice to its backward pass."""

    call: ReplicaCaller
    row_split: RowSplit
    slices: list[list[Any]] = field(init=False)
    tapes: list[Any] = field(init=False)
    # By replica: ids of the copies of variables that the tape watches.
    watched: list[set[int]] = field(init=False)
    reads: dict[int, Any] = field(default_factory=dict)
    # The replicas whose tapes have been asked for gradients.
    asked: set[int] = field(default_factory=set)
    is_forward: bool = True
    # What is recomputed for gradients of gradients.
    layer_call: Any = None
    _zeros: dict[Any, tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = self.row_split.sizes
        count = len(self.sizes)
        self.slices = [[] for _ in range(count)]
        self.tapes = [None] * count
        self.watched = [set() for _ in range(count)]
        self.lead = self.call.lead
        placement = self.call.placement
        self.collectives = LockstepCollectives(
            placement.replicas[:count],
            placement.variables,
            self.row_split.replica_set,
            self.call.reduction,
        )
        self.traces = ReplicaTraces(
            self.call.devices, self.slices, self.call.local_value, self.collectives
        )
        self.graph = tf.compat.v1.get_default_graph()

    @property
    def is_static(self) -> bool:
        return all(isinstance(size, int) for size in self.sizes)

    def open_tapes(self) -> None:
        """Records the replicas, unless no tape can ask for a gradient."""
        if tf.executing_eagerly() and not compat.is_any_tape_active():
            return
        # Under a persistent tape TensorFlow traces the gradient of a loop three times
        # over when the loop is made. In a graph, `_gradients` does without one.
        self.tapes = [
            tf.GradientTape(
                persistent=tf.executing_eagerly(), watch_accessed_variables=False
            )
            for _ in self.sizes
        ]

    def close_tapes(self) -> None:
        """Drops the tapes of a graph in which no outer tape asks for gradients.

        A tape refers to tensors and so to the graph, whose boundary refers to this job,
        and the garbage collector does not see what a tape refers to. Gradients that are
        asked for later, as by a tape around the graph's function, come from the graph.
        """
        if not tf.executing_eagerly() and not compat.is_any_tape_active():
            self.tapes = [None] * len(self.sizes)

    def forward(
        self, replica: ReplicaOfAny, i: int, task: Callable[[], ReplicaResult]
    ) -> ReplicaResult:
        """Calls the layer on a replica, or copies what another one has traced."""
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
                return task()
            with self.traces.tracing(replica, i) as trace:
                trace.result = task()
                return trace.result

    def _gradients(
        self, i: int, targets: list[Any], sources: list[Any], given: list[Any]
    ) -> list[Any]:
        """From a replica's tape; those that it has given already, from its graph."""
        tape = self.tapes[i]
        if tape is None or (i in self.asked and not compat.is_persistent(tape)):
            found = compat.graph_gradients(targets, sources, given, self.graph)
        else:
            found = tape.gradient(targets, sources, output_gradients=given)
        self.asked.add(i)
        return list(found)

    def outside_control_flow(self) -> Any:
        """A copy that is first needed in a loop is made before the loop."""
        if tf.executing_eagerly():
            return tf.name_scope("")
        return self.graph.as_default()

    @property
    def is_current_graph(self) -> bool:
        """Whether no loop, branch or program was entered since the call began."""
        return tf.executing_eagerly() or (
            tf.compat.v1.get_default_graph() is self.graph
        )

    def read(self, raw: Any) -> Any:
        """The value of a variable, read once for all replicas."""
        if id(raw) not in self.reads:
            with tf.device(self.lead):
                self.reads[id(raw)] = tf.convert_to_tensor(raw)
        return self.reads[id(raw)]

    def zero_if_empty(self, tensor: Any, replica_id: int) -> Any:
        """Zeros in place of what a replica without rows computed: means of nothing."""
        size = self.sizes[replica_id]
        if isinstance(size, int) or isinstance(tensor, tf.IndexedSlices):
            return tensor
        graph = tf.compat.v1.get_default_graph()
        # One operation for each tensor: a model has hundreds of gradients.
        key = id(graph), replica_id, tensor.dtype
        if key not in self._zeros:
            self._zeros[key] = size > 0, tf.zeros([], tensor.dtype)
        has_rows, zero = self._zeros[key]
        return tf.raw_ops.SelectV2(condition=has_rows, t=tensor, e=zero)

    def check_rows(self, channels: Sequence[Channel]) -> None:
        """In a program for any number of rows, outputs are checked as it runs."""
        if self.is_static:
            return
        for channel in channels:
            if channel.weights is None:
                for part, size in zip(channel.parts, self.sizes, strict=True):
                    tf.debugging.assert_equal(
                        tf.shape(part)[0],
                        size,
                        "A layer that is called on several replicas returned another "
                        "number of rows than it got, so that its outputs cannot be "
                        "joined. Return one row per sample.",
                    )

    def combine(self, channel: Channel) -> Any:
        with tf.device(self.lead):
            parts = [tf.stop_gradient(part) for part in channel.parts]
            if channel.weights is None:
                own = tf.concat(parts, 0) if len(parts) > 1 else tf.identity(parts[0])
                return self.row_split.joined(own)
            terms = [
                self.zero_if_empty(part, i) * tf.cast(weight, part.dtype)
                for i, (part, weight) in enumerate(
                    zip(map(widened, parts), channel.weights, strict=True)
                )
            ]
            [total] = self.row_split.summed([tf.add_n(terms)])
            return tf.cast(total, parts[0].dtype)

    def sources(
        self,
        inputs: Sequence[tuple[Any, list[Any]]],
        results: Sequence[ReplicaResult],
    ) -> list[_GradientTarget]:
        found: dict[Any, _GradientTarget] = {}
        for replica_id, result in enumerate(results):
            for key, (variable, local) in result.state.reads.items():
                if id(local) not in self.watched[replica_id]:
                    continue
                if key not in found:
                    raw = raw_value(variable)
                    with tf.device(self.lead):
                        value = tf.convert_to_tensor(raw)
                        if value.dtype != local.dtype:
                            value = tf.cast(value, local.dtype)
                    found[key] = _GradientTarget(
                        value, [None] * len(results), False, variable
                    )
                found[key].locals[replica_id] = local
        sources = list(found.values())
        for tensor, slices in inputs:
            if is_float(tensor):
                with tf.device(self.lead):
                    own = _own_source(self.row_split, tensor)
                sources.append(_GradientTarget(own, list(slices), by_rows=True))
        return sources

    def backward(
        self,
        sources: Sequence[_GradientTarget],
        channels: Sequence[Channel],
        gradients: Sequence[Any],
    ) -> list[Any]:
        """Gradients of the sources, from those of the combined channels."""
        if compat.is_recorded([*gradients, *(source.tensor for source in sources)]):
            return self._differentiable_gradients(sources, gradients)
        shares = [
            self._shares(channel, gradient)
            for channel, gradient in zip(channels, gradients, strict=True)
        ]

        def task(i: int) -> Callable[[], list[Any]]:
            def run() -> list[Any]:
                own = [source.locals[i] for source in sources]
                found = iter(
                    self._gradients(
                        i,
                        [channel.parts[i] for channel in channels],
                        [local for local in own if local is not None],
                        [share[i] for share in shares],
                    )
                )
                return [None if local is None else next(found) for local in own]

            return run

        self.is_forward = False
        self.traces.set_given(shares)
        tasks = [task(i) for i in range(len(self.sizes))]
        per_replica = self.call.run_tasks(self, tasks)
        with tf.device(self.lead):
            found = self._together(sources, list(zip(*per_replica, strict=True)))
            shared = [i for i, source in enumerate(sources) if not source.by_rows]
            totals = sums_over_workers(
                [found[i] for i in shared], self.row_split.workers
            )
            for i, total in zip(shared, totals, strict=True):
                found[i] = in_dtype_of(total, sources[i].tensor)
            return found

    def _differentiable_gradients(
        self, sources: Sequence[_GradientTarget], gradients: Sequence[Any]
    ) -> list[Any]:
        """The same gradients, of operations that an outer tape can record."""
        if self.row_split.workers is not None:
            raise ContextError(
                "A gradient that goes through a layer called on several workers was "
                "asked for while another `tf.GradientTape` records it; gradients of "
                "gradients do not cross workers. Leave the tape first, compute the "
                "penalty inside a layer's `call`, or use ks.MirroredStrategy."
            )
        values: dict[int, Any] = {}
        inputs = [source.tensor for source in sources if source.by_rows]
        trained = {id(s.variable) for s in sources if s.variable is not None}
        with (
            tf.device(self.lead),
            tf.GradientTape(watch_accessed_variables=False) as tape,
        ):
            tape.watch(inputs)

            def value_of(variable: Any) -> Any:
                raw = raw_value(variable)
                if id(variable) not in trained:
                    return raw
                values[id(variable)] = tf.convert_to_tensor(raw)
                tape.watch(values[id(variable)])
                return values[id(variable)]

            found = self.call.recompute(self.layer_call, value_of)
            outputs = [output for output in found if is_float(output)]
        with tf.device(self.lead):
            wanted = [*values.values(), *inputs]
            results = tape.gradient(outputs, wanted, output_gradients=list(gradients))
            # A variable is several sources where each of its reads has a gradient.
            of_variables = dict(zip(values, results, strict=False))
            of_inputs = iter(results[len(values) :])
            returned = []
            for source in sources:
                if source.by_rows:
                    gradient = next(of_inputs)
                else:
                    gradient = of_variables.pop(id(source.variable), None)
                if gradient is not None and gradient.dtype != source.tensor.dtype:
                    gradient = tf.cast(gradient, source.tensor.dtype)
                returned.append(gradient)
            return returned

    def _shares(self, channel: Channel, gradient: Any) -> list[Any]:
        """The parts' gradients, from that of the concatenation or weighted sum."""
        with tf.device(self.lead):
            if channel.weights is not None:
                wide = widened(gradient)
                return [
                    tf.cast(wide * tf.cast(w, wide.dtype), gradient.dtype)
                    for w in channel.weights
                ]
            gradient = self.row_split.own(gradient)
            if len(channel.parts) == 1:
                return [gradient]
            sizes = [
                part.shape[0] if part.shape[0] is not None else tf.shape(part)[0]
                for part in channel.parts
            ]
            return tf.split(gradient, sizes)

    def _together(
        self, sources: Sequence[_GradientTarget], columns: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """The gradient of each source, from those of the local replicas."""
        pairs = list(zip(sources, columns, strict=True))
        shared = [self._counted(parts) for source, parts in pairs if not source.by_rows]
        sums = iter(sums_of(shared, self.call.reduction))
        return [
            _rows_together(source, parts) if source.by_rows else next(sums)
            for source, parts in pairs
        ]

    def _counted(self, parts: Sequence[Any]) -> list[Any]:
        """A variable's gradients, zeros on replicas without rows."""
        return [
            None if part is None else self.zero_if_empty(part, i)
            for i, part in enumerate(parts)
        ]


def boundary(
    job: LayerCallOnReplicas,
    sources: Sequence[_GradientTarget],
    channels: Sequence[Channel],
) -> list[Any]:
    """The edge between the global batch and the replicas, for outer tapes."""

    @custom_gradient
    def connected(*tensors: Any) -> Any:
        def grad(*gradients: Any) -> list[Any]:
            return job.backward(sources, channels, gradients)

        return [job.combine(channel) for channel in channels], grad

    return list(connected(*(source.tensor for source in sources)))


def _own_source(row_split: RowSplit, tensor: Any) -> Any:
    """This worker's rows, through which a gradient goes to the global batch."""
    if row_split.workers is None:
        return tensor

    # Workers exchange that gradient only where an outer tape needs it.
    @custom_gradient
    def own(tensor: Any) -> tuple[Any, Callable[[Any], Any]]:
        return row_split.own(tensor), row_split.joined

    return own(tensor)


def _rows_together(source: _GradientTarget, parts: Sequence[Any]) -> Any:
    """The gradient of an input, from those of its slices."""
    if all(part is None for part in parts):
        return None
    return tf.concat(
        [
            tf.zeros_like(local) if part is None else tf.convert_to_tensor(part)
            for part, local in zip(parts, source.locals, strict=True)
        ],
        0,
    )


def is_float(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)
