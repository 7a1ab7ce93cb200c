"""The data-parallel call on TensorFlow: one tape per replica, one boundary."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from keras_strategies import context
from keras_strategies.collectives.replica_ops import LocalReduction
from keras_strategies.engines.tensorflow.data_parallel.assigned_values import (
    assigned_value,
)
from keras_strategies.engines.tensorflow.data_parallel.gradient_boundary import (
    LayerCallOnReplicas,
    boundary,
    is_float,
)
from keras_strategies.engines.tensorflow.data_parallel.graph_copies import (
    ReplicaOfAny,
)
from keras_strategies.engines.tensorflow.data_parallel.row_probing import (
    probing,
    stand_in,
)
from keras_strategies.engines.tensorflow.devices import tf_device
from keras_strategies.engines.tensorflow.replicas.lockstep_replicas import (
    NestedCollectiveError,
    ReplicaEngine,
)
from keras_strategies.engines.tensorflow.replicas.mirrored_variables import (
    MirroredVariable,
)
from keras_strategies.engines.tensorflow.tensor_primitives import PRIMITIVES
from keras_strategies.engines.tensorflow.worker_collectives import workers_of
from keras_strategies.input.row_splits import split_sizes
from keras_strategies.keras_compat.backends.keras_on_tensorflow import (
    holds_tf_variables,
)
from keras_strategies.keras_compat.models.layer_calls import layer_calls_through
from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.keras_compat.variables.seeds import seed_offset
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.data_parallel.layer_call import (
    Channel,
    DataParallelCall,
    ReplicaResult,
)
from keras_strategies.runtime.replicas.replica_set import RowSplit
from keras_strategies.runtime.row_checks.layer_probes import Randomness
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


class TensorFlowDataParallelCall(DataParallelCall):
    """Calls a layer on the replicas of a strategy."""

    def __init__(self, strategy: StrategyCore, engine: ReplicaEngine):
        super().__init__(strategy)
        self._engine = engine
        self.devices = [tf_device(d) for d in self.placement.replicas]
        self.lead = tf_device(self.placement.variables)
        self._foreign: weakref.WeakKeyDictionary[Any, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._workers = workers_of(self.placement)
        #: The strategy's `CrossDeviceOps`, None for TensorFlow's own sums.
        self.reduction = LocalReduction.of(strategy)
        self._share = self.placement.share
        # While a step is traced: its batch's tensors, and their first values.
        self._values: dict[int, tuple[Any, Any]] = {}
        # Calls do not nest: none is routed while one is under way.
        self._on_replicas = LayerCallOnReplicas(self, RowSplit.local(PRIMITIVES, []))

    def __call__(
        self,
        layer: Any,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        try:
            return super().__call__(layer, call, args, kwargs)
        except NestedCollectiveError:
            warn_user(
                f"Layer {layer.name!r} ({type(layer).__name__}) needs all replicas "
                "together in a loop or a branch, for batch normalization for example, "
                "which TensorFlow cannot do there. It is called on one device with "
                "the whole batch instead, which is exact but not parallel. Call the "
                "normalization outside of the loop to run it on all replicas."
            )
            self._not_by_rows.add(layer)
        with layer_calls_through(None):
            return call(*args, **kwargs)

    def sizes(
        self,
        layer: Any,
        rows: Any,
        call_few: Callable[[], int],
        tensors: Sequence[Any],
    ) -> list[Any] | None:
        if self._has_foreign_variables(layer):
            return None
        if any(isinstance(t, (tf.RaggedTensor, tf.SparseTensor)) for t in tensors):
            return None
        total = self._share.total
        every: list[Any]
        if isinstance(rows, int):
            every = split_sizes(rows, total)
        else:
            if _cannot_take_no_rows(layer):
                rows = self._at_least_one_each(layer, rows)
            base, larger = rows // total, rows % total
            every = [base + tf.cast(i < larger, base.dtype) for i in range(total)]
        # Replicas without rows do not take part, where that is known: they would add
        # nothing.
        if self._workers is None:
            row_split = RowSplit.local(PRIMITIVES, every)
            is_alone = len(row_split.sizes) == 1 and self.devices[0] == self.lead
            if not row_split.sizes or (is_alone and self.reduction is None):
                return None
        else:
            found = RowSplit.over(PRIMITIVES, every, self._workers)
            if found is None:
                # Too few for all workers: each computes all of them.
                return None
            row_split = found
        self._on_replicas = LayerCallOnReplicas(self, row_split)
        return row_split.sizes

    def _at_least_one_each(self, layer: Any, rows: Any) -> Any:
        count = self._share.total
        check = tf.debugging.assert_greater_equal(
            rows,
            tf.cast(count, rows.dtype),
            f"Layer {layer.name!r} was called on fewer rows than the {count} replicas, "
            "in a program for any number of rows. It contains convolutions or max "
            "pooling, of which TensorFlow's kernels fail on the replicas that have "
            "none. Call it on more rows, or use ks.OneDeviceStrategy.",
        )
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(rows)

    def _has_foreign_variables(self, layer: Any) -> bool:
        """Whether a layer computes with variables that are not Keras's."""
        known = self._foreign.get(layer)
        if known is None:
            known = self._foreign[layer] = holds_tf_variables(layer)
            if known:
                warn_user(
                    f"Layer {layer.name!r} contains variables or modules of "
                    "TensorFlow. They cannot be replaced by a replica's copies, so "
                    "the layer is called on one device with the whole batch, which "
                    "is exact but not parallel. Use `add_weight` and Keras layers to "
                    "run it on all replicas."
                )
        return known

    def split(self, tensor: Any, sizes: Sequence[Any]) -> list[Any]:
        parts = []
        tensor = self._on_replicas.row_split.own(tensor)
        pieces = tf.split(tensor, list(sizes)) if len(sizes) > 1 else [tensor]
        for i, part in enumerate(pieces):
            with tf.device(self.devices[i]):
                # Behind the gradient's boundary, which begins with the slices.
                parts.append(tf.identity(tf.stop_gradient(part)))
            self._on_replicas.slices[i].append(parts[-1])
        return parts

    def run(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        self._on_replicas.open_tapes()
        return self.run_tasks(self._on_replicas, tasks)

    def run_tasks(
        self, job: LayerCallOnReplicas, tasks: Sequence[Callable[[], Any]]
    ) -> list[Any]:
        replicas = job.row_split.replica_set

        def in_context(replica_id: int) -> Callable[[], Any]:
            replica = ReplicaOfAny(
                self.strategy,
                replicas.first + replica_id,
                job.collectives,
                replicas.total,
            )

            def run() -> Any:
                with context.on_replica(replica):
                    if job.is_forward:
                        return job.forward(replica, replica_id, tasks[replica_id])
                    return job.traces.backward(replica_id, tasks[replica_id])

            return run

        return self._engine.run(
            [in_context(i) for i in range(len(tasks))], job.collectives
        )

    def copy_variable(self, replica_id: int, variable: Any) -> Any:
        raw = raw_value(variable)
        if raw is None:
            return None
        job = self._on_replicas
        tape = job.tapes[replica_id]
        with job.outside_control_flow():
            if tape is None:
                return job.traces.read(replica_id, variable, raw)
            with tape.stop_recording():
                local = job.traces.read(replica_id, variable, raw)
            if self._is_trained(variable, raw):
                tape.watch(local)
                job.watched[replica_id].add(id(local))
            return local

    def cast_copy(self, replica_id: int, value: Any, dtype: str) -> Any:
        job = self._on_replicas
        tape = job.tapes[replica_id]
        # In a loop, each turn casts: it is the sum over turns that is float32.
        if (
            tape is None
            or id(value) not in job.watched[replica_id]
            or not job.is_current_graph
        ):
            return None
        with tape.stop_recording(), tf.device(self.devices[replica_id]):
            cast = tf.cast(value, dtype)
        tape.watch(cast)
        job.watched[replica_id].add(id(cast))
        return cast

    def _is_trained(self, variable: Any, raw: Any) -> bool:
        """Whether somebody can ask for the gradient of a variable.

        A tape asks for those of frozen ones too, as far as TensorFlow knows, and drops
        them. They would cost nothing, did they not travel between workers.
        """
        if self._workers is not None and not variable.trainable:
            return False
        return bool(raw.trainable) and is_float(raw)

    def local_value(self, replica_id: int, variable: Any, raw: Any) -> Any:
        """The value that a replica computes with, on its device."""
        device = self.devices[replica_id]
        own = raw.copy_on(device) if isinstance(raw, MirroredVariable) else None
        value = self._on_replicas.read(raw) if own is None else own.read_value()
        with tf.device(device):
            everywhere = self._on_replicas.row_split.replica_set.first + replica_id
            offset = seed_offset(variable, everywhere)
            if offset:
                return value + tf.constant([offset, 0], dtype=value.dtype)
            return tf.identity(tf.stop_gradient(value))

    def assigned_value(self, variable: Any, read: Callable[[], Any], value: Any) -> Any:
        if not self._is_trained(variable, raw_value(variable)):
            return tf.stop_gradient(value)
        return assigned_value(read(), value)

    def connect(
        self,
        inputs: Sequence[tuple[Any, list[Any]]],
        results: Sequence[ReplicaResult],
        channels: Sequence[Channel],
    ) -> list[Any]:
        job = self._on_replicas
        job.layer_call = self._layer_call
        job.check_rows(channels)
        if job.tapes[0] is None:
            return [job.combine(channel) for channel in channels]
        sources = job.sources(inputs, results)
        differentiable = [c for c in channels if is_float(c.parts[0])]
        if not sources or not differentiable:
            return [job.combine(channel) for channel in channels]
        connected = iter(boundary(job, sources, differentiable))
        job.close_tapes()
        return [
            next(connected) if is_float(c.parts[0]) else job.combine(c)
            for c in channels
        ]

    def fractions(self, sizes: list[Any], rows: Any) -> list[Any]:
        if isinstance(rows, int):
            return super().fractions(sizes, rows)
        count = tf.cast(tf.maximum(rows, 1), "float32")
        return [tf.cast(size, "float32") / count for size in sizes]

    def to_lead(self, tensor: Any) -> Any:
        with tf.device(self.lead):
            return tf.identity(tf.stop_gradient(tensor))

    def joined(self, parts: list[Any]) -> Any:
        with tf.device(self.lead):
            return self._on_replicas.row_split.joined(super().joined(parts))

    def all_fractions(self, sizes: list[Any], rows: Any) -> list[Any]:
        return self.fractions(self._on_replicas.row_split.every, rows)

    def on_all_workers(self, columns: list[list[Any]]) -> list[list[Any]]:
        with tf.device(self.lead):
            return self._on_replicas.row_split.replica_set.all_values(columns)

    @contextlib.contextmanager
    def tracing(self, traced: Any, batch: Any) -> Iterator[None]:
        """Entered around the tracing of a step.

        Args:
            traced: the batch in the program, a structure of tensors without values.
            batch: the first batch that it will run on.
        """
        if tf.executing_eagerly() or batch is None:
            yield
            return
        pairs = zip(tf.nest.flatten(traced), tf.nest.flatten(batch), strict=True)
        self._values = {
            id(tensor): (tensor, value)
            for tensor, value in pairs
            if isinstance(value, tf.Tensor)
        }
        try:
            yield
        finally:
            self._values = {}

    def values_of(self, tensor: Any) -> Any | None:
        if hasattr(tensor, "numpy"):
            return tensor
        _, value = self._values.get(id(tensor), (tensor, None))
        return value

    def probe_input(self, tensor: Any, rows: int | None) -> Any:
        values = self.values_of(tensor)
        if values is None:
            return stand_in(tensor, rows)
        with tf.device(self.lead):
            return tf.identity(values[:rows] if tensor.shape.rank else values)

    def probing(self, quantile: float) -> contextlib.AbstractContextManager[Randomness]:
        return probing(self.lead, quantile)


def _cannot_take_no_rows(layer: Any) -> bool:
    """Whether TensorFlow 2.21 fails on no rows, by an error, a wrong shape or a crash.

    Without rows, its convolutions for CPUs have the channels of their input, and the
    gradient of max pooling ends the process.
    """
    names = (type(sub).__name__ for sub in sublayers(layer))
    return any("Conv" in name or "MaxPool" in name for name in names)
