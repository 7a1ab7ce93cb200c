"""`ks.callbacks.Verify`: checks of replicas while a model trains."""

from __future__ import annotations

import math
import time
from typing import Any

import keras
import numpy as np

from keras_strategies.errors import InvalidArgumentError, ReplicaError
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.runtime.state.model_values import copied_value
from keras_strategies.verification.arguments import check_int
from keras_strategies.verification.comparison import relative_gap
from keras_strategies.verification.copies import differing_copies
from keras_strategies.verification.layer_outputs import observed_layers

_TOLERANCE = {"float32": 1e-4, "float64": 1e-9}
_OF_HALVES = 3e-2
#: The length of an axis that a model leaves open.
_LENGTH = 4


class Verify(keras.callbacks.Callback):
    """Checks the copies of variables and the replicas of a layer during `fit`.

    Finds silent corruption of a device, and copies that were not updated together. Each
    check compares the copies of some variables, bit by bit, and calls one layer on each
    replica with the same few random rows and `training=False`. The next check takes the
    next variables and the next layer.

    Args:
        every: int, steps between two checks, or more: see `time_share`.
        rows: int, rows of the layer call.
        share: float, the part of the variables' bytes that a check reads, at least one
            variable.
        time_share: float, the part of the time of training that checks may take: after
            one that took longer, the next waits for more steps. None for no bound.

    Raises:
        ValueError: for invalid numbers; in `fit`, for a strategy without copies to
            compare.
        RuntimeError: as `ks.errors.ReplicaError` in `fit`, for a difference, with the
            variable or the layer, the replica and the step.

    Example:

    >>> model.fit(x, y, callbacks=[ks.callbacks.Verify(every=100)])
    """

    def __init__(
        self,
        every: int = 100,
        rows: int = 2,
        share: float = 1 / 16,
        time_share: float | None = 0.005,
    ):
        super().__init__()
        check_int("every", "Verify", every, 1)
        check_int("rows", "Verify", rows, 1)
        parts = {"share": share, "time_share": 1 if time_share is None else time_share}
        for name, part in parts.items():
            if not 0 < part <= 1:
                raise InvalidArgumentError(
                    f"`{name}` of `Verify` must be above 0, and at most 1. Received: "
                    f"{part!r}"
                )
        self.every, self.rows, self.share = every, rows, share
        self.time_share = time_share
        #: int, the number of checks so far.
        self.checks = 0
        self._steps = self._next_variable = self._next_layer = 0
        self._begin_interval(every)
        self._random = np.random.default_rng(0)

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = strategy_of(self.model)
        has_copies = strategy is not None and strategy.placement.mesh is None
        if not has_copies or strategy.drivers.servers is not None:
            raise InvalidArgumentError(
                "`ks.callbacks.Verify` compares the copies that replicas have of a "
                "model's variables. Found: "
                f"{'no strategy' if strategy is None else repr(strategy)}. Use it with "
                "a model of the scope of `ks.MirroredStrategy`, "
                "`ks.CentralStorageStrategy` or `ks.MultiWorkerMirroredStrategy`."
            )

        self._begin_interval(self.every)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        self._left -= 1
        if self._left:
            return
        begun = time.monotonic()
        step = (begun - self._begun) / self._interval
        self.check()
        steps = self.every
        if self.time_share is not None:
            seconds = time.monotonic() - begun
            steps = max(steps, math.ceil(seconds / (self.time_share * step)))
            workers = strategy_of(self.model).workers
            if workers is not None:
                name = "steps until the next check"
                steps = workers.group.gather_values(name, steps)[0]
        self._begin_interval(steps)

    def _begin_interval(self, steps: int) -> None:
        self._interval = self._left = steps
        self._begun = time.monotonic()

    def check(self) -> None:
        """Makes one check now.

        Raises:
            RuntimeError: for a difference.
        """
        model = self.model  # Keras on JAX writes the state into the variables here.
        strategy = strategy_of(model)
        self.checks += 1
        for path, one, other in differing_copies(strategy, self._some_variables(model)):
            raise ReplicaError(
                f"Copies of variable {path!r} differ after step {self._steps}, by "
                f"{relative_gap(one, other, 0.0):.2g} of the largest value. If no code "
                "assigns it on one replica only, a device has computed or stored it "
                "wrong. Continue from a snapshot of before, without that device."
            )
        inputs = [(each, _input_of(each)) for each in observed_layers(model)]
        layers = [(layer, given) for layer, given in inputs if given is not None]
        if layers:
            layer, given = layers[self._next_layer % len(layers)]
            self._next_layer += 1
            self._check_layer(strategy, layer, *given)

    def _some_variables(self, model: Any) -> list[Any]:
        variables = [*model.trainable_variables]
        if model.optimizer is not None:
            variables += model.optimizer.variables
        sizes = [int(np.prod(each.shape)) for each in variables]
        left, found = self.share * sum(sizes), list[Any]()
        while variables and left > 0 and len(found) < len(variables):
            i = self._next_variable % len(variables)
            found.append(variables[i])
            left -= sizes[i]
            self._next_variable += 1
        return found

    def _check_layer(
        self, strategy: Any, layer: Any, shape: tuple[int | None, ...], dtype: str
    ) -> None:
        lengths = [_LENGTH if n is None else n for n in shape[1:]]
        x: Any = self._random.normal(size=(self.rows, *lengths))
        if "float" not in dtype:
            x = np.abs(x) > 0.5
        same = strategy.experimental_distribute_values_from_function(
            lambda context: keras.ops.convert_to_tensor(x, dtype)
        )

        def call(rows: Any) -> Any:
            return keras.tree.flatten(layer(rows, training=False))

        tolerance = _TOLERANCE.get(layer.compute_dtype, _OF_HALVES)
        for output in strategy.run(call, args=(same,)):
            copies = strategy.experimental_local_results(output)
            one, *others = map(copied_value, copies)
            for i, other in enumerate(others, 1):
                gap = relative_gap(one, other, 0.0)
                if gap > tolerance:
                    raise ReplicaError(
                        f"Replica {i} computes other outputs than replica 0 in layer "
                        f"{layer.name!r} after step {self._steps}, from the same rows: "
                        f"by {gap:.2g} of the largest value. Its copy of a variable, "
                        "or its device, is wrong."
                    )


def _input_of(layer: Any) -> tuple[tuple[int | None, ...], str] | None:
    """Shape and dtype of a layer's only input; None for other layers."""
    try:
        tensor = layer.input
    except (AttributeError, ValueError):  # Not a layer of a functional model.
        return None
    if not isinstance(tensor, keras.KerasTensor) or not tensor.shape:
        return None
    return tuple(tensor.shape), tensor.dtype
