"""Optimizers of scheduled functions, sent to the servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle
import keras

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    optimizers_of,
    trained_variables,
    weight_decay_applies,
)
from keras_strategies.parameter_server.server.optimizer_spec import (
    load_optimizer_spec,
)
from keras_strategies.parameter_server.variables.object_pickling import ObjectPickler
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.parameter_server.wire.server_connections import ServerConnections


class OptimizerRegistry:
    """Sends servers the optimizers of scheduled functions, each once.

    Args:
        registry: the variables.
        pickler: pickles optimizers.
        servers: connections to the servers.
        lazy_rows: bool, see `ParameterServerStrategy`.
        scope: the strategy's, in which optimizers are built.
    """

    def __init__(
        self,
        registry: VariableRegistry,
        pickler: ObjectPickler,
        servers: ServerConnections,
        lazy_rows: bool,
        scope: Callable[[], AbstractContextManager[Any]],
    ):
        self._registry = registry
        self._pickler = pickler
        self._scope = scope
        self._servers = servers
        self._lazy_rows = lazy_rows
        # Number of variables of each optimizer when it was sent.
        self._sent: dict[int, int] = {}

    def send_all(self, optimizers: Sequence[Any], variables: Mapping[int, Any]) -> bool:
        """Sends servers the optimizers that they do not have.

        Args:
            optimizers: of a scheduled function.
            variables: descriptions by number, its variables.

        Returns:
            Whether the placement of any variable has changed.
        """
        for optimizer in optimizers:
            _check(optimizer)
        unbuilt = [optimizer for optimizer in optimizers if not optimizer.built]
        if len(unbuilt) > 1:
            raise InvalidArgumentError(
                f"{len(unbuilt)} optimizers of a scheduled function are not built, so "
                "the variables that each of them trains are ambiguous. Call "
                "`optimizer.build(variables)` of each in the strategy's scope."
            )
        if unbuilt:
            trainable = [
                self._registry.variable(number)
                for number, description in variables.items()
                if description.kind == "weight" and description.trainable
            ]
            if not trainable:
                return False
            with self._scope():
                unbuilt[0].build(trainable)
        has_changed = bool(unbuilt)
        for optimizer in optimizers:
            if optimizer.built:
                has_changed |= self._send(optimizer)
        return has_changed

    def release(self, numbers: Sequence[int]) -> None:
        """Deletes from the servers optimizers that no longer exist here."""
        for number in numbers:
            if self._sent.pop(number, None) is not None:
                servers = range(len(self._servers))
                self._servers.request_all("release", dict.fromkeys(servers, number))

    def _send(self, optimizer: Any) -> bool:
        """Sends the servers an optimizer, unless they have it.

        Returns:
            Whether the placement of its variables has changed.
        """
        registry = self._registry
        number = self._pickler.number_of(optimizer)
        if self._sent.get(number) == len(optimizer.variables):
            return False
        trained = {
            registry.describe(variable).number: variable
            for variable in trained_variables(optimizer)
        }
        has_moved = self._place(optimizer, trained)
        blob = self._pickler.dump(optimizer).blob
        slots: dict[int, list[int]] = {each: [] for each in trained}
        scalars = []
        for variable in optimizer.variables:
            description = registry.describe(variable)
            reference = registry.references.get(description.number)
            if reference in slots:
                slots[reference].append(description.number)
            elif description.kind == "scalar":
                scalars.append(description.number)
        decays = {
            each: weight_decay_applies(optimizer, variable)
            for each, variable in trained.items()
        }
        make = functools.partial(
            load_optimizer_spec,
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
        self._servers.request_all(
            "optimizer", dict.fromkeys(servers, (number, pickled))
        )
        self._sent[number] = len(optimizer.variables)
        return has_moved

    def _place(self, optimizer: Any, trained: dict[int, Any]) -> bool:
        """Copies scalars to every server; returns whether there were any elsewhere."""
        registry, has_moved = self._registry, False
        for variable in optimizer.variables:
            description = registry.describe(variable)
            if (
                description.kind == "scalar"
                or registry.references.get(description.number) in trained
            ):
                continue
            if description.shape:
                raise InvalidArgumentError(
                    f"Optimizer {type(optimizer).__name__} has a variable of shape "
                    f"{description.shape}, {description.path!r}, that was not created "
                    "by `add_variable_from_reference`, so the server that updates with "
                    "it is not known. Use an optimizer with slots of the shape of "
                    "their variable, such as Adam, or ks.MirroredStrategy."
                )
            registry.replicate(variable)
            has_moved = True
        return has_moved

    def _constraints(self, optimizer: Any) -> dict[int, Any]:
        found = {}
        for variable in trained_variables(optimizer):
            description = self._registry.describe(variable)
            if variable.constraint is None:
                continue
            if len(description.shards) > 1:
                raise InvalidArgumentError(
                    f"Variable {variable.path!r} has the constraint "
                    f"{variable.constraint!r}, which needs all of its rows, but it is "
                    f"sharded into {len(description.shards)} shards. Let "
                    f"`variable_partitioner` return 1 for its shape "
                    f"{description.shape}, or omit the constraint."
                )
            found[description.number] = variable.constraint
        return found


def _check(optimizer: Any) -> None:
    """Raises for optimizers that servers do not apply."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidArgumentError(
            f"Optimizer {kind} changes its loss scale by the gradients of all "
            "variables, and each parameter server has those of some. Use the dtype "
            'policy "mixed_bfloat16", which needs no loss scale, a fixed '
            "`loss_scale_factor` of the inner optimizer, or ks.MirroredStrategy."
        )
    if optimizers_of(optimizer):
        raise InvalidArgumentError(
            f"Optimizer {kind} consists of several, and parameter servers apply one. "
            "Call `apply` of each with its variables in a scheduled function, or use "
            "ks.MirroredStrategy."
        )
    clips = optimizer.clipnorm or optimizer.global_clipnorm
    if optimizer.gradient_accumulation_steps and clips:
        raise InvalidArgumentError(
            "`gradient_accumulation_steps` with `clipnorm` or `global_clipnorm` "
            "needs the norms of accumulated gradients, and a parameter server has "
            "only some of the variables. Use `clipvalue`, or larger batches."
        )
