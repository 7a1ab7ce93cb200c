"""Base class of strategies."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keras_strategies import context
from keras_strategies.cluster.resolver import ClusterResolver
from keras_strategies.collectives import local_results, reduce_gather
from keras_strategies.collectives.cross_device_ops import (
    CrossDeviceOps,
    check_cross_device_ops,
    is_built_in,
)
from keras_strategies.context import check_results, check_returns
from keras_strategies.engines import get_engine
from keras_strategies.errors import (
    BackendError,
    ContextError,
    InvalidArgumentError,
    ModelScopeError,
)
from keras_strategies.input import distribute
from keras_strategies.input.arrays import from_arrays
from keras_strategies.input.distributed_dataset import DistributedDataset
from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.models.building import build_optimizer
from keras_strategies.reports.describe import Description, describe
from keras_strategies.reports.plan import Plan, plan
from keras_strategies.reports.worker_status import TrainingStatus, worker_status
from keras_strategies.runtime.drivers import CheckpointDriver
from keras_strategies.runtime.engine import Feature, StrategyCore, require
from keras_strategies.runtime.placement import Placement
from keras_strategies.strategies.extended import StrategyExtended
from keras_strategies.training.model_hooks import install_hooks
from keras_strategies.training.tensorflow_calls import (
    check_no_tensorflow_results,
    check_not_in_tf_function,
    replacements_named,
)
from keras_strategies.types import (
    InputContext,
    InputOptions,
    ReduceOp,
    RunOptions,
    check_flag,
)
from keras_strategies.values import (
    PerReplica,
    regroup,
    select_replica,
)

# Attributes of strategies for other modules of this package; `dir` leaves them out.
_INTERNAL = frozenset(
    {
        "always_split",
        "engine",
        "created",
        "default_replica_context",
        "drivers",
        "input_context",
        "input_share",
        "other_workers",
        "owns",
        "placement",
        "replicas_here",
        "synced_variables",
        "workers",
    }
)


@dataclass(frozen=True)
class ValueContext:
    """The replica that a value is created for.

    Args:
        replica_id_in_sync_group: int, the number of the replica, from 0.
        num_replicas_in_sync: int, how many replicas there are.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


class Strategy(StrategyCore):
    """Placement of variables and computation on devices.

    Strategies are made by their subclasses, which choose the parts and add nothing.

    Args:
        placement: where replicas compute and where variables are.
        cross_device_ops: how values are combined, or None for the backend's way.
        sync_batch_norm: bool, whether batch normalization uses the statistics of
            the global batch.
        always_split: bool, whether layer calls are split over replicas even where
            calling them whole is faster.
    """

    def __init__(
        self,
        placement: Placement,
        cross_device_ops: CrossDeviceOps | None = None,
        sync_batch_norm: bool = True,
        always_split: bool = False,
    ):
        check_cross_device_ops(cross_device_ops)
        check_flag("sync_batch_norm", sync_batch_norm)
        check_flag("always_split", always_split)
        install_hooks()
        engine = get_engine()
        custom = None if is_built_in(cross_device_ops) else cross_device_ops
        if custom is not None:
            require(engine, Feature.CUSTOM_REDUCTIONS)
        if not sync_batch_norm and placement.share.total > 1:
            require(engine, Feature.SEPARATE_BATCH_NORM)
        super().__init__(
            engine, placement, cross_device_ops, sync_batch_norm, always_split
        )

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The description of the cluster and of this task; None on one machine."""
        return None

    @property
    def extended(self) -> StrategyExtended:
        """A view of devices, variables and reductions, as `tf.distribute` has it."""
        return StrategyExtended(self)

    @property
    def distribution(self) -> Any:
        """The `keras.distribution.Distribution` underneath; None without one."""
        sharding = self._drivers.sharding
        return None if sharding is None else sharding.distribution

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Makes this strategy current: models made inside belong to it.

        Returns:
            A context manager; the `as` target is the strategy.

        Raises:
            RuntimeError: inside another strategy's scope ("Mixing different
                strategies").

        Example:

        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        """
        with context.entered(self), patching.installed_while("scope"):
            yield self

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls `fn` once on each replica, in replica context.

        On JAX `fn` is compiled, and traced again when something that it closes over has
        changed: a name, an attribute in its code, the contents of a list or dictionary,
        a setting of a Keras layer. Other values that change, such as the contents of
        NumPy arrays, must be arguments or a `keras.Variable`.

        Args:
            fn: callable; ordinary Keras code that may call models, apply optimizers,
                update metrics and assign variables.
            args: list or tuple of structures. Each replica gets its component of
                every `DistributedValues` in them, and everything else as it is.
            kwargs: dict of structures, likewise.
            options: `RunOptions`, or None for the defaults.

        Returns:
            The results as one structure: identical objects are bare, others are
            `PerReplica`. With one replica, its result.

        Raises:
            TypeError: if `options` is something else.
            ValueError: if `args` is not a list or tuple, or if replicas get different
                shapes with `experimental_enable_dynamic_batch_size=False`.
            RuntimeError: inside `run`, or in another strategy's scope.

        Example:

        >>> def fn(x):
        ...     return x * ks.get_replica_context().num_replicas_in_sync
        >>> strategy.run(fn, args=(distributed_batch,))
        """
        checked = RunOptions.parse(options)
        self._check_outside_replicas("run")
        check_not_in_tf_function("run")
        if not isinstance(args, (list, tuple)):
            raise InvalidArgumentError(
                "`args` of `run` must be a list or tuple with one entry per "
                f"argument of the function. Received: {type(args).__name__}. Write "
                "`args=(value,)` for one argument."
            )
        check_returns(fn, "run")
        replicas = range(self.replicas_here)
        own_args = [tuple(select_replica(i, list(args))) for i in replicas]
        own_kwargs = [select_replica(i, kwargs or {}) for i in replicas]
        if not checked.experimental_enable_dynamic_batch_size:
            local_results.check_equal_shapes(self, own_args, own_kwargs)
        with context.entered(self), replacements_named():
            results = self._drivers.run.run(fn, own_args, own_kwargs)
        check_results(results)
        check_no_tensorflow_results(results)
        return regroup(results)

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        axis: int | Sequence[int] | None = None,
    ) -> Any:
        """Reduces a value over replicas.

        Args:
            reduce_op: `ReduceOp` or its name, in any case.
            value: a structure of `PerReplica`; anything else counts as being the
                same on every replica.
            axis: int, or a sequence of them: axes to reduce along as well, which
                replicas may have different lengths of; None to reduce over replicas
                only.

        Returns:
            The structure of reduced tensors. A mean along an axis divides by the
            number of elements that there are, on all replicas together.

        Raises:
            ValueError: for an unknown operation or shapes that do not fit.
            RuntimeError: inside `run`; use `ReplicaContext.all_reduce` there.

        Example:

        >>> strategy.reduce("MEAN", per_example_losses, axis=0)
        """
        self._check_outside_replicas("reduce")
        op = ReduceOp.parse(reduce_op)
        assert isinstance(op, ReduceOp)
        with context.entered(self):
            return reduce_gather.reduce(self, op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenates the replicas' values.

        Args:
            value: a structure of `PerReplica` tensors.
            axis: int, the axis to concatenate along; lengths may differ there.

        Returns:
            The structure of tensors, parts in replica order.

        Raises:
            ValueError: for scalars, or shapes that differ along another axis.
            RuntimeError: inside `run`; use `ReplicaContext.all_gather` there.
        """
        self._check_outside_replicas("gather")
        with context.entered(self):
            return reduce_gather.gather(self, value, axis)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """The components of a value, one for each replica of this process.

        Args:
            value: a `DistributedValues`; a `keras.Variable`; a structure of them in
                lists, tuples and dictionaries; or another value, which has no
                components.

        Returns:
            tuple: of a `DistributedValues`, its components; of a variable that
            several replicas use, its value on each, as a tensor on that replica's
            device; of a structure, one for each replica, with its components. Of
            anything else, and of a variable of one replica, `(value,)`.
        """
        return local_results.results(self, value)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Makes a per-replica value from a function.

        Args:
            value_fn: callable of a `ValueContext`, which says which replica it is
                for; returns the component.

        Returns:
            The components, as `run` regroups results.

        Example:

        >>> strategy.experimental_distribute_values_from_function(
        ...     lambda context: context.replica_id_in_sync_group)
        """
        self._check_outside_replicas("experimental_distribute_values_from_function")
        share = self.input_share()
        values = [
            value_fn(ValueContext(share.first + i, share.total))
            for i in range(share.count)
        ]
        return values[0] if share.count == 1 else PerReplica(values)

    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        batch_size: int | None = None,
    ) -> DistributedDataset:
        """Splits each global batch of a dataset over the replicas.

        Every row goes to one replica, in order: `range(10).batch(4)` on two replicas
        ends `[8]`, `[9]`. Replicas without rows get zero rows.

        Args:
            dataset: a dataset whose batches are global batches: a `tf.data.Dataset`,
                a torch `DataLoader`, a `keras.utils.PyDataset`, or an iterable of
                structures of arrays, each of shape `(rows, ...)`. Arrays, tensors
                and frames of pandas, alone or in tuples and dictionaries, are made
                into batches first.
            options: `InputOptions`, or None for the defaults.
            batch_size: int, rows of the global batch, for arrays; None for 32, as in
                `fit`.

        Returns:
            A `DistributedDataset`: an iterable of batches whose leaves are
            `PerReplica`, with one replica tensors.

        Raises:
            ValueError: for what is no dataset, for one that is not batched, and,
                while it is iterated, for a batch whose parts have different lengths.
            RuntimeError: inside `run`.

        Example:

        >>> dataset = strategy.experimental_distribute_dataset(
        ...     tf.data.Dataset.from_tensor_slices((x, y)).batch(64))
        >>> for batch in dataset:
        ...     strategy.run(train_step, args=(batch,))
        """
        self._check_outside_replicas("experimental_distribute_dataset")
        return distribute.dataset(self, dataset, options, batch_size)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Distributes datasets that a function makes, without splitting batches.

        Args:
            dataset_fn: callable of an `InputContext` that returns a dataset of any
                kind, whose batches are for one replica each: consecutive ones go to
                consecutive replicas, without being split or joined. It is called once
                for each worker, or once for each replica with
                `InputReplicationMode.PER_REPLICA`. When the dataset ends amid the
                replicas, the others get zero rows.
            options: `InputOptions`, or None for the defaults.

        Returns:
            A `DistributedDataset`.

        Raises:
            TypeError: if `dataset_fn` is not callable.
            ValueError: if it returns no dataset, or one that is not batched.
            RuntimeError: inside `run`.

        Example:

        >>> def dataset_fn(context):
        ...     batch_size = context.get_per_replica_batch_size(64)
        ...     return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch_size)
        >>> dataset = strategy.distribute_datasets_from_function(dataset_fn)
        """
        self._check_outside_replicas("distribute_datasets_from_function")
        return distribute.from_function(self, dataset_fn, options)

    # The former experimental name.
    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def make_experimental_numpy_dataset(
        self, numpy_input: Any, session: Any = None
    ) -> Any:
        """A dataset of the rows of arrays, to be batched and then distributed.

        Args:
            numpy_input: structure of arrays with the same first axis, `(rows, ...)`.
            session: must be None: there are no sessions here.

        Returns:
            On TensorFlow a `tf.data.Dataset`; elsewhere an object with its methods
            `batch`, `shuffle`, `repeat`, `prefetch` and `cardinality`.

        Raises:
            ValueError: for scalars and arrays of different lengths, and for a session.

        Example:

        >>> dataset = strategy.make_experimental_numpy_dataset((x, y)).batch(64)
        >>> dataset = strategy.experimental_distribute_dataset(dataset)
        """
        if session is not None:
            raise InvalidArgumentError(
                "`session` is for TensorFlow 1 and not supported. Omit it. "
                f"Received: {session!r}"
            )
        rows = from_arrays(numpy_input)
        return rows.as_tf_data() if self._engine.name == "tensorflow" else rows

    def _check_outside_replicas(self, method: str) -> None:
        if context.current_replica() is not None:
            raise ContextError(
                f"`{method}` was called inside a replica function of "
                f"{context.current_strategy()!r}, where code runs on each replica. "
                "Call it outside of `run`; inside, `ks.get_replica_context()` has "
                "`all_reduce`, `all_gather` and `merge_call`."
            )

    def describe(self, model: Any) -> Description:
        """A table of the placement of variables and of bytes per device.

        Args:
            model: a built `keras.Model`, made in this strategy's scope.

        Returns:
            A `Description`: text in a terminal, a table in a notebook.

        Raises:
            ValueError: if the model has no variables yet.
            RuntimeError: if the model was created in another scope.
        """
        self._check_owns(model, "describe")
        return describe(self, model)

    def status(self) -> TrainingStatus:
        """A table of the workers and of the times of their steps in `fit`.

        Steps take as long as those of the slowest worker, which the others wait for. A
        worker that takes twice the median of the others over 20 steps is also named in
        a warning, once.

        Returns:
            A `TrainingStatus`: text in a terminal, a table in a notebook. Times are at
            most a second old.

        Raises:
            RuntimeError: for `ParameterServerStrategy`, whose coordinator has a
                `status`.

        Example:

        >>> print(strategy.status())
        """
        workers = self.workers
        group = None if workers is None else workers.group
        return worker_status(type(self).__name__, group)

    def plan(self, build_fn: Callable[[], Any], batch_shapes: Any) -> Plan:
        """Memory and communication of training a model, from its shapes.

        No memory of the model's size is allocated, so larger models can be planned.

        Args:
            build_fn: callable without arguments that makes the model and compiles it;
                called in the scope. It may not read values of variables.
            batch_shapes: the global batch as `fit` gets it, `(x, y)` or
                `(x, y, sample_weight)`, whose leaves are shapes such as `(32, 10)`,
                `keras.KerasTensor`s or arrays.

        Returns:
            A `Plan`: variables and their layouts, and bytes per device of parameters,
            gradients and slots, of a whole step, and of what a device sends in one;
            on JAX these are read from the compiled step. Text in a terminal, tables
            in a notebook; `plot` draws the mesh.

        Raises:
            ValueError: if `build_fn` makes no compiled model.

        Example:

        >>> strategy = ks.ModelParallelStrategy("auto", model_parallel=8)
        >>> print(strategy.plan(make_model, ((32, 512), (32, 512))))
        """
        self._check_outside_replicas("plan")
        return plan(self, build_fn, batch_shapes)

    def save_sharded(
        self, model: Any, directory: str | os.PathLike[str], keep: int = 1
    ) -> int:
        """Saves a model's state without gathering sharded variables.

        Each process writes the shards of its devices. A checkpoint counts when it is
        complete: until then, and if a process is killed, the previous one stays the
        latest. JAX only; needs the extra `checkpoint` (Orbax).

        Args:
            model: a built `keras.Model` of this strategy. Its variables are saved,
                seed generators among them, and its optimizer's.
            directory: path to a directory for the model's checkpoints; made if there
                is none.
            keep: int, how many checkpoints to keep, 1 or more.

        Returns:
            int, the number of the checkpoint, which counts from 1.

        Raises:
            RuntimeError: on other backends, without Orbax, or if the model was made
                elsewhere.
            ValueError: if `keep` is no positive int.

        Example:

        >>> strategy.save_sharded(model, "checkpoints")
        >>> other_strategy.load_sharded(same_model_made_there, "checkpoints")
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise InvalidArgumentError(
                f"`keep` must be a number of checkpoints, 1 or more. Received: {keep!r}"
            )
        self._check_owns(model, "save")
        with context.entered(self):
            return self._checkpoints.save_sharded(model, Path(directory), keep)

    def load_sharded(self, model: Any, directory: str | os.PathLike[str]) -> int:
        """Loads the latest checkpoint that `save_sharded` has finished.

        Each device reads only its shards, under any strategy that saved the checkpoint.

        Args:
            model: a built `keras.Model` of this strategy with the same variables. Its
                optimizer is built, if it is not yet.
            directory: path to the directory.

        Returns:
            int, the number of the checkpoint.

        Raises:
            ValueError: if there is no finished checkpoint, or one of another model.
            RuntimeError: as for `save_sharded`.
        """
        self._check_owns(model, "load")
        with context.entered(self):
            build_optimizer(model)
            return self._checkpoints.load_sharded(model, Path(directory))

    @property
    def _checkpoints(self) -> CheckpointDriver:
        require(self._engine, Feature.SHARDED_CHECKPOINTS)
        driver = self._drivers.checkpoints
        if driver is None:
            raise BackendError(
                f"{self!r} has no sharded checkpoints: its variables are in other "
                "processes. Use `model.save` and `keras.models.load_model`."
            )
        return driver

    def _check_owns(self, model: Any, what: str) -> None:
        if not self.owns(model):
            raise ModelScopeError(
                f"Model {model.name!r} was not created in the scope of {self!r}, "
                f"which therefore cannot {what} it."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # Copies of a model train under the same strategy.
        return self

    def __dir__(self) -> list[str]:
        # What trainers and hooks use of a strategy is not for its users.
        found = super().__dir__()
        return sorted(n for n in found if n not in _INTERNAL and n[:1] != "_")

    def __repr__(self) -> str:
        devices = ", ".join(str(device) for device in self._placement.replicas)
        text = f"<{type(self).__name__} on {devices}"
        if self.workers is not None:
            group = self.workers.group
            text += f", worker {group.index} of {group.count}"
        return f"{text}>"
