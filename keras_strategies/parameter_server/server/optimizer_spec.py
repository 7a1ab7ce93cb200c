"""Optimizers on a server: variables replaced by templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from keras_strategies.keras_compat.optimizers.optimizer_classes import plain_optimizer
from keras_strategies.keras_compat.saving.pickling import renew_identities
from keras_strategies.keras_compat.variables.creation import (
    make_variable,
    set_variable_shape,
)
from keras_strategies.parameter_server.variables.object_pickling import (
    UnpicklingContext,
    load,
)
from keras_strategies.parameter_server.wire.variable_description import (
    VariableDescription,
)


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer on a server.

    Args:
        number: int, its number in the cluster.
        optimizer: the Keras optimizer, with templates for variables.
        templates: dict from a variable's number to its template.
        scalars: tuple of the numbers of scalar variables, which every server has: the
            step, the learning rate.
        slots: dict from a trained variable's number to those of its slots.
        decays: dict from a trained variable's number to whether it has weight decay.
        constraints: dict from a trained variable's number to its constraint,
            which applies to the unsharded variable.
        exact_rows: bool, whether rows without a gradient are updated as on one device:
            by momentum, by weight decay.
    """

    number: int
    optimizer: Any
    templates: dict[int, Any]
    scalars: tuple[int, ...]
    slots: dict[int, tuple[int, ...]]
    decays: dict[int, bool]
    constraints: dict[int, Any]
    exact_rows: bool


class _Templates(UnpicklingContext):
    """Variables of an optimizer on a server: with a shape, without a value."""

    def __init__(self) -> None:
        super().__init__()
        self.templates: dict[int, Any] = {}

    def variable(self, description: VariableDescription) -> Any:
        if description.number not in self.templates:
            empty = np.zeros([min(n, 1) for n in description.shape], "float32")
            template = make_variable(
                description.path, description.trainable, description.dtype, empty
            )
            set_variable_shape(template, description.shape)
            self.templates[description.number] = template
        return self.templates[description.number]


def load_optimizer_spec(blob: bytes, number: int, *rest: Any) -> OptimizerSpec:
    """Unpickles an optimizer on a server."""
    context = _Templates()
    optimizer = load(blob, context, 0)
    # Another class would have registered the variables under other names.
    plain_optimizer(optimizer)
    renew_identities([optimizer])
    return OptimizerSpec(number, optimizer, context.templates, *rest)
