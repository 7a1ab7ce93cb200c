"""`strategy.plan(build_fn, batch_shapes)`: memory and communication from shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.models.building import symbolic_build
from keras_strategies.keras_compat.models.running_methods import running_methods
from keras_strategies.keras_compat.state_scope import ShapesOnly
from keras_strategies.keras_compat.variables.deferred import (
    build_optimizer_without_values,
    discarding_deferred_variables,
)
from keras_strategies.layouts import Axes
from keras_strategies.reports.describe import (
    MESH_HEADER,
    NUMBERS,
    layout_text,
    title_of,
)
from keras_strategies.runtime.placement import (
    StepCost,
    axes_of,
    check_layouts,
    itemsize,
)
from keras_strategies.text_tables import ShownAsTable, Table, counted, readable_bytes

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


@dataclass(frozen=True)
class PlannedVariable:
    """One variable that a model would have.

    Args:
        path: str.
        shape: tuple of int.
        dtype: str.
        kind: str, "weight", "slot" or "metric".
        trainable: bool.
        axes: tuple, the mesh's axes that it is sharded along.
        nbytes: int, bytes on each device that keeps it or a part of it.
        devices: tuple of str, these devices.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    trainable: bool
    axes: Axes
    nbytes: int
    devices: tuple[str, ...]


@dataclass(frozen=True, repr=False)
class Plan(ShownAsTable):
    """Memory and communication per device; prints as text, in notebooks as tables.

    Args:
        title: str, the strategy and the model.
        variables: tuple of `PlannedVariable`.
        cost: what a step costs.
    """

    title: str
    variables: tuple[PlannedVariable, ...]
    cost: StepCost

    def bytes_per_device(self, kind: str) -> dict[str, int]:
        """Bytes of the variables of a kind on each device.

        Args:
            kind: str, "weight", "slot", "metric", or "gradient", which has
                the layout of its weight.

        Returns:
            dict from device to int.
        """
        totals: dict[str, int] = {}
        for variable in self.variables:
            is_gradient = kind == "gradient" and variable.trainable
            if variable.kind == kind or is_gradient:
                for device in variable.devices:
                    totals[device] = totals.get(device, 0) + variable.nbytes
        return totals

    @property
    def peak(self) -> int | None:
        """int, bytes that a device needs while a step runs; None if not known."""
        return self.cost.peak

    @property
    def sent(self) -> int:
        """int, bytes that a device sends in one step."""
        return sum(nbytes for _, nbytes in self.cost.sent.values())

    def summary(self) -> list[tuple[str, str]]:
        """Lines with a need and its amount."""
        lines = []
        for name, kind in (
            ("parameters", "weight"),
            ("gradients", "gradient"),
            ("optimizer slots", "slot"),
        ):
            totals = self.bytes_per_device(kind)
            most = max(totals.values(), default=0)
            where = "" if len(set(totals.values())) < 2 else f" on {_largest(totals)}"
            lines.append((f"{name} per device", readable_bytes(most) + where))
        if self.cost.activation is not None:
            size = readable_bytes(self.cost.activation)
            lines.append(("largest activation per device", size))
        if self.cost.peak is not None:
            lines.append(("peak of a step per device", readable_bytes(self.cost.peak)))
        for kind, (count, nbytes) in self.cost.sent.items():
            text = f"{readable_bytes(nbytes)} in {count}"
            lines.append((f"sent per step: {kind}", text))
        if not self.cost.sent:
            lines.append(("sent per step", "nothing"))
        return lines

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                v.path,
                "x".join(map(str, v.shape)) or "scalar",
                v.dtype,
                layout_text(v.axes, len(v.shape)),
                readable_bytes(v.nbytes),
            )
            for v in self.variables
            if v.kind == "weight"
        ]

    def _table(self) -> Table:
        facts = (*self.summary(), ("step costs", self.cost.source))
        rows = tuple(self._rows())
        return Table(self.title, MESH_HEADER, rows, NUMBERS, facts=facts)


def _largest(totals: dict[str, int]) -> str:
    return max(totals, key=lambda device: totals[device])


def plan(
    strategy: StrategyCore, build_fn: Callable[[], Any], batch_shapes: Any
) -> Plan:
    """See `Strategy.plan`."""
    batch = abstract_batch(batch_shapes)
    with (
        strategy.scope(),
        discarding_deferred_variables(),
        ShapesOnly().scope(),
        # Its calls of the model train nothing.
        running_methods.one(is_long=False),
    ):
        model = build_fn()
        if not isinstance(model, keras.Model) or not model.compiled:
            raise InvalidArgumentError(
                "`build_fn` of `plan` must return a compiled `keras.Model`. It "
                f"returned: {model!r}"
            )
        _build(strategy, model, batch)
        check_layouts(strategy.placement, model)
        cost = strategy.drivers.fit.step_cost(model, batch)
        variables = _variables(strategy, model)
        count = model.count_params()
    title = f"{title_of(strategy, model)}, {counted(count, 'parameter')}"
    return Plan(title, variables, cost)


def _build(strategy: StrategyCore, model: Any, batch: Any) -> None:
    # Weights are laid out first: slots copy their layouts.
    optimizer, model.optimizer = model.optimizer, None
    symbolic_build(model, batch)
    model.optimizer = optimizer
    if strategy.drivers.sharding is not None:
        strategy.drivers.sharding.set_layouts(model.variables)
    strategy.drivers.fit.plan_variables(model.variables)
    build_optimizer_without_values(optimizer, model.trainable_variables)


def abstract_batch(shapes: Any) -> Any:
    """`KerasTensor`s in place of shapes, and of arrays and the like."""
    if shapes is None or isinstance(shapes, keras.KerasTensor):
        return shapes
    if isinstance(shapes, dict):
        return {key: abstract_batch(value) for key, value in shapes.items()}
    if hasattr(shapes, "shape") and hasattr(shapes, "dtype"):
        dtype = keras.backend.standardize_dtype(shapes.dtype)
        return keras.KerasTensor(tuple(shapes.shape), dtype=dtype)
    if not isinstance(shapes, (list, tuple)):
        raise InvalidArgumentError(
            "`batch_shapes` must be a shape such as (32, 10), a "
            "`keras.KerasTensor`, an array, or a structure of these as `fit` gets "
            f"it: (x, y) or (x, y, sample_weight). Received: {shapes!r}"
        )
    if shapes and all(isinstance(n, int) and not isinstance(n, bool) for n in shapes):
        return keras.KerasTensor(tuple(shapes))
    return tuple(abstract_batch(shape) for shape in shapes)


def _variables(strategy: StrategyCore, model: Any) -> tuple[PlannedVariable, ...]:
    kinds = {"weight": model.variables, "slot": model.optimizer.variables}
    kinds["metric"] = model.metrics_variables
    found: dict[int, PlannedVariable] = {}
    mesh, every = strategy.placement.mesh, strategy.placement.variable_devices
    for kind, variables in kinds.items():
        devices = strategy.drivers.fit.planned_devices(kind == "weight")
        for variable in variables:
            if id(variable) in found:
                continue
            shape = tuple(variable.shape)
            axes = axes_of(mesh, variable) if mesh else ()
            part = mesh.shard_shape(shape, axes) if mesh else shape
            found[id(variable)] = PlannedVariable(
                variable.path,
                shape,
                variable.dtype,
                kind,
                kind == "weight" and bool(variable.trainable),
                axes,
                math.prod(part) * itemsize(variable.dtype),
                tuple(str(device) for device in (every if any(axes) else devices)),
            )
    return tuple(found.values())
