"""The replicas of a strategy, on a mesh of devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from keras_strategies.engines.jax.function.state_refs import OnReadValues
from keras_strategies.runtime.replicas.mixed_rows import MixedRows

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore


@dataclass(frozen=True)
class ReplicaMesh:
    """The replicas of a strategy, along the first axis of a mesh.

    Args:
        strategy: the strategy.
        mesh: the mesh.
        on_read_values: the replica values of on-read variables.
        mixed_rows: checks layer calls of replicas.
    """

    strategy: StrategyCore
    mesh: jax.sharding.Mesh
    on_read_values: OnReadValues
    mixed_rows: MixedRows

    @property
    def axis(self) -> str:
        """The name of the axis of replicas."""
        name: str = self.mesh.axis_names[0]
        return name

    @property
    def count(self) -> int:
        """The number of replicas."""
        return self.on_read_values.count
