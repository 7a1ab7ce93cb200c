"""Gradients on NumPy: finite differences of the replicas' summed losses.

They are exact for quadratic losses. For any loss, their sum over replicas is the finite
difference of the summed loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_strategies.keras_compat.state_scope import current_policy
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime import context
from keras_strategies.runtime.state.replica_state import ReplicaState

#: A power of two, so that small numbers stay exact.
STEP = 2.0**-4


def finite_differences(loss_of: Callable[[], Any], variable: Any) -> Any:
    """The gradient of the replicas' summed losses; None if no loss reads the variable.

    In replica context all replicas take the same steps, and each of them moves its
    copy in turn.
    """
    outer, replica = current_policy(), context.current_replica()
    count, own = 1, 0
    if replica is not None:
        count, own = replica.num_replicas_in_sync, replica.replica_id_in_sync_group

    def value_of(read: Any) -> Any:
        value = None if outer is None else outer.read(read)
        return raw_value(read) if value is None else value

    value = np.asarray(value_of(variable))
    gradient = np.zeros_like(value)
    is_read = False

    def total(moved: Any) -> Any:
        """The summed loss; what it assigns is dropped."""
        nonlocal is_read
        moved = np.asarray(moved)
        state = ReplicaState(lambda v: moved if v is variable else value_of(v))
        with state.scope():
            loss = loss_of()
        is_read |= id(variable) in state.reads
        return loss if replica is None else replica.all_reduce("SUM", loss)

    for mover in range(count):
        for index in np.ndindex(value.shape):
            step = np.zeros_like(value)
            step[index] = STEP if mover == own else 0
            slope = (total(value + step) - total(value - step)) / (2 * STEP)
            if mover == own:
                gradient[index] = slope
    return gradient if is_read else None
