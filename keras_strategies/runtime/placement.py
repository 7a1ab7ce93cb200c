"""Placement of replicas and variables on devices, and their memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.devices import Device
from keras_strategies.keras_compat.backends.keras_on_jax import layout_of
from keras_strategies.keras_compat.models.building import is_built
from keras_strategies.layouts import Axes, VariableMesh


@dataclass(frozen=True)
class Placement:
    """Devices of replicas and of variables.

    Args:
        replicas: the device of each local replica.
        variables: the device of the authoritative copy of variables. Outputs, loss,
            metrics and the update of the global batch are computed there.
        mirrored: bool, whether each replica has a persistent copy of the variables, or
            reads the authoritative one in each step.
        workers: the workers of a cluster; None with one process. `replicas` and
            `variables` are devices of this process.
        mesh: the mesh of devices over which variables are sharded, with `replicas` as
            its first column; None without sharded variables.
    """

    replicas: tuple[Device, ...]
    variables: Device
    mirrored: bool
    workers: Communicator | None = None
    mesh: VariableMesh | None = None

    @property
    def variable_devices(self) -> tuple[Device, ...]:
        """Devices with copies or shards of variables."""
        if self.mesh is not None:
            return self.mesh.own_devices
        return self.replicas if self.mirrored else (self.variables,)

    @property
    def is_single(self) -> bool:
        """Whether one device computes everything, so that no batch is split."""
        alone = self.workers is None and self.mesh is None
        return alone and self.replicas == (self.variables,)

    @property
    def replica_counts(self) -> ReplicaCounts:
        """The numbers of replicas of all workers."""
        if self.workers is not None:
            return self.workers.replica_counts
        return ReplicaCounts((len(self.replicas),))


@dataclass(frozen=True)
class VariableCopy:
    """Memory of a variable on one device.

    Args:
        device: str, a Keras-style device name.
        nbytes: int, the size of the copy in bytes.
        role: str, `"variable"` for the authoritative copy or a persistent mirrored one;
            `"shard"` for a shard.
        value: the tensor or variable of the backend on the device.
    """

    device: str
    nbytes: int
    role: str
    value: Any


@dataclass(frozen=True)
class StepCost:
    """Cost of one training step, estimated without running it.

    Args:
        peak: int, bytes that a device needs while the step runs: variables, batch and
            activations; None if unknown.
        sent: dict from the name of a collective, such as `"all-reduce"`, to the number
            of such collectives and the bytes that a device sends in them.
        source: str, the method of the estimate.
        activation: int, bytes of the largest activation of a replica; None if unknown.
    """

    peak: int | None
    sent: dict[str, tuple[int, int]]
    source: str
    activation: int | None = None


def mirrored_step_cost(placement: Placement, model: Any) -> StepCost:
    """The cost of a step in which the first device updates mirrored variables.

    Args:
        placement: the devices of replicas and variables.
        model: a model with variables without values.
    """
    others = sum(device != placement.variables for device in placement.replicas)
    trained = sum(nbytes_of(v) for v in model.trainable_variables)
    fixed = sum(nbytes_of(v) for v in model.non_trainable_variables)
    sent = {}
    if others:
        sent["weights to replicas"] = (others, others * (trained + fixed))
        sent["gradients from replicas"] = (others, others * trained)
    return StepCost(None, sent, "estimated from the sizes of the variables")


def check_layouts(placement: Placement, model: Any) -> None:
    """Raises `LayoutError` if a layout map has patterns that match nothing."""
    mesh = placement.mesh
    if mesh is not None and is_built(model):
        mesh.rule.check_matches()


def axes_of(mesh: VariableMesh, variable: Any) -> Axes:
    """The mesh axes that a variable is sharded along; `()` if it is replicated."""
    layout = layout_of(variable)
    if layout is None:
        return ()
    axes = list(layout.axes)
    while axes and axes[-1] is None:
        axes.pop()
    return tuple(axes)


def nbytes_of(variable: Any) -> int:
    return math.prod(variable.shape) * itemsize(variable.dtype)


def itemsize(dtype: str) -> int:
    """Bytes of an element: of "bfloat16" 2, of "bool" 1."""
    bits = "".join(c for c in dtype.split("_")[0].removeprefix("b") if c.isdigit())
    return max(int(bits) // 8, 1) if bits else 1
