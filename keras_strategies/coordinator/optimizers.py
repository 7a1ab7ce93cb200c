"""Optimizers on their way to the parameter servers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np

from keras_strategies import keras_compat
from keras_strategies.coordinator.loss_scale import innermost
from keras_strategies.coordinator.pickling import Described, Receiver, load
from keras_strategies.coordinator.updates import OptimizerSpec
from keras_strategies.errors import InvalidArgumentError

if TYPE_CHECKING:
    from keras_strategies.coordinator.registry import Registry
    from keras_strategies.coordinator.servers import Servers


class Optimizers:
    """Gives servers the optimizers that closures use, each once.

    Args:
        registry: knows the variables.
        servers: who gets them.
        lazy_rows: bool, see `ParameterServerStrategy`.
    """

    def __init__(self, registry: Registry, servers: Servers, lazy_rows: bool):
        self._registry = registry
        self._servers = servers
        self._lazy_rows = lazy_rows
        # How many variables each had when it was sent.
        self._sent: dict[int, int] = {}

    def send(self, optimizer: Any, is_strategy: Any) -> None:
        """Gives the servers an optimizer, unless they have it.

        Of one that scales losses it is the one that it wraps.
        """
        optimizer = innermost(optimizer)
        _check(optimizer)
        registry = self._registry
        number = registry.number_of(optimizer)
        if self._sent.get(number) == len(optimizer.variables):
            return
        for variable in optimizer.variables:
            if registry.describe(variable).kind == "weight":
                registry.put_everywhere(optimizer, variable)
        blob, _, _, _ = registry.dump(optimizer, is_strategy)
        trained = [
            registry.describe(v) for v in keras_compat.trained_variables(optimizer)
        ]
        slots: dict[int, list[int]] = {about.number: [] for about in trained}
        scalars = []
        for variable in optimizer.variables:
            about = registry.describe(variable)
            if about.kind == "slot":
                slots[registry.references[about.number]].append(about.number)
            else:
                scalars.append(about.number)
        decays = {
            registry.describe(v).number: keras_compat.weight_decay_applies(optimizer, v)
            for v in keras_compat.trained_variables(optimizer)
        }
        make = functools.partial(
            make_spec,
            blob,
            number,
            tuple(scalars),
            {n: tuple(own) for n, own in slots.items()},
            decays,
            self._constraints(optimizer),
            not self._lazy_rows,
        )
        pickled = cloudpickle.dumps(make)
        servers = range(len(self._servers))
        self._servers.ask_all("optimizer", dict.fromkeys(servers, (number, pickled)))
        self._sent[number] = len(optimizer.variables)

    def _constraints(self, optimizer: Any) -> dict[int, Any]:
        found = {}
        for variable in keras_compat.trained_variables(optimizer):
            about = self._registry.describe(variable)
            if variable.constraint is None:
                continue
            if len(about.parts) > 1:
                raise InvalidArgumentError(
                    f"Variable {variable.path!r} has the constraint "
                    f"{variable.constraint!r}, which is of the whole variable, and is "
                    f"cut into {len(about.parts)} parts. Leave it whole: let "
                    "`variable_partitioner` return 1 for its shape."
                )
            found[about.number] = variable.constraint
        return found


def _check(optimizer: Any) -> None:
    clips = optimizer.clipnorm or optimizer.global_clipnorm
    if optimizer.gradient_accumulation_steps and clips:
        raise InvalidArgumentError(
            "`gradient_accumulation_steps` with `clipnorm` or `global_clipnorm` "
            "clips sums of gradients by norms of whole ones, which no parameter "
            "server sees. Use `clipvalue`, or larger batches."
        )


def check_scalar(optimizer: Any, variable: Any, shape: tuple[int, ...]) -> None:
    """Raises for an optimizer's variable that no server can keep for itself."""
    if shape:
        raise InvalidArgumentError(
            f"Optimizer {type(optimizer).__name__} keeps a variable of shape {shape}, "
            f"{variable.path!r}, which belongs to no variable of its shape, so it "
            "cannot be cut and placed as they are. Parameter servers take optimizers "
            "whose variables come from `add_variable_from_reference`, such as SGD, "
            "Adagrad, Adam, AdamW, RMSprop, Ftrl and Lion."
        )


class _Templates(Receiver):
    """Variables of an optimizer on a server, which have a place and no value."""

    def __init__(self) -> None:
        super().__init__()
        self.templates: dict[int, Any] = {}

    def variable(self, described: Described) -> Any:
        if described.number not in self.templates:
            empty = np.zeros([min(n, 1) for n in described.shape], "float32")
            template = keras_compat.make_variable(
                described.path, described.trainable, described.dtype, empty
            )
            keras_compat.set_variable_shape(template, described.shape)
            self.templates[described.number] = template
        return self.templates[described.number]


def make_spec(blob: bytes, number: int, *rest: Any) -> OptimizerSpec:
    """An optimizer as servers use it, from what was pickled here."""
    receiver = _Templates()
    optimizer = load(blob, receiver, 0)
    # It knows its variables by what another class would call them.
    keras_compat.plain_optimizer(optimizer)
    keras_compat.renew_identities([optimizer])
    return OptimizerSpec(number, optimizer, receiver.templates, *rest)
