"""All layer calls of the table, for all backends.

Values hide what the operations do: weights are zero, capacities are not reached, losses
have a factor of zero. `problem=True` expects that the call is not split.
"""

from __future__ import annotations

from row_proofs.layer_cases import KERAS_LAYERS
from row_proofs.operation_cases import MIXING_OPERATIONS, ROW_OPERATIONS
from row_proofs.training_cases import CONTROL_FLOW, GRADIENTS, LOSSES, UPDATES

CASES = [
    *KERAS_LAYERS,
    *ROW_OPERATIONS,
    *MIXING_OPERATIONS,
    *LOSSES,
    *UPDATES,
    *GRADIENTS,
    *CONTROL_FLOW,
]
