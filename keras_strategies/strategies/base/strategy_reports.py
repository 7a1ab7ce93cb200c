"""Methods of strategies that return tables: `describe`, `status` and `plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_strategies.reports.describe import Description, describe
from keras_strategies.reports.plan import Plan, plan
from keras_strategies.reports.timeline import Timeline, timeline
from keras_strategies.reports.worker_status import TrainingStatus, worker_status
from keras_strategies.strategies.base.strategy_checks import StrategyChecks


class StrategyReports(StrategyChecks):
    """Tables about a strategy, its workers and its models."""

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

        All workers wait for the slowest one in each step. A worker that takes twice the
        median of the others over 20 steps is also named in a warning, once.

        Returns:
            A `TrainingStatus`: text in a terminal, a table in a notebook. Times are at
            most a second old.

        Raises:
            RuntimeError: for `ParameterServerStrategy`; its coordinator has a
                `status`.

        Example:

        >>> print(strategy.status())
        """
        workers = self.workers
        group = None if workers is None else workers.group
        return worker_status(type(self).__name__, group)

    def timeline(self) -> Timeline:
        """The last events of all workers, on one clock.

        Every process records when it was in steps, reads of batches, waits for other
        workers, files and garbage collection. All workers call this. With parameter
        servers, the events are those of this process.

        Returns:
            A `Timeline`; `save` writes a file for https://ui.perfetto.dev.

        Example:

        >>> model.fit(x, y)
        >>> timeline = strategy.timeline()
        >>> if strategy.cluster_resolver.task_id == 0:
        ...     timeline.save("run.json")
        """
        self._check_outside_replicas("timeline")
        return timeline(self.workers)

    def plan(self, build_fn: Callable[[], Any], batch_shapes: Any) -> Plan:
        """Memory and communication of training a model, from its shapes.

        No memory of the model's size is allocated, so larger models can be planned.

        Args:
            build_fn: callable without arguments that makes the model and compiles it;
                called in the scope. It may not read values of variables.
            batch_shapes: the global batch as `fit` gets it, `(x, y)` or
                `(x, y, sample_weight)`; leaves are shapes such as `(32, 10)`,
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
