"""Optimizers of scheduled functions, sent to the servers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    optimizers_of,
    trained_variables,
    weight_decay_applies,
)
from keras_strategies.keras_compat.optimizers.used_variables import used_by_update
from keras_strategies.parameter_server.server.optimizer_spec import (
    load_optimizer_spec,
)
from keras_strategies.parameter_server.variables.object_pickling import ObjectPickler
from keras_strategies.parameter_server.variables.optimizer_wrappers import (
    has_dynamic_scale,
    innermost,
)
from keras_strategies.parameter_server.variables.variable_registry import (
    VariableRegistry,
)
from keras_strategies.parameter_server.wire.server_connections import ServerConnections
from keras_strategies.parameter_server.wire.variable_description import (
    VariableDescription,
)


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
        # Slots without a row for each row of their variable.
        self._unsharded: set[int] = set()

    def send_all(self, optimizers: Sequence[Any], variables: Mapping[int, Any]) -> bool:
        """Sends servers the optimizers that they do not have.

        Args:
            optimizers: of a scheduled function.
            variables: descriptions by number, its variables.

        Returns:
            Whether the placement of any variable has changed.
        """
        inner = [innermost(o) for o in optimizers if has_dynamic_scale(o)]
        inner += [each for o in optimizers for each in optimizers_of(o)]
        # Wrapped optimizers are built with their wrapper.
        unbuilt = [
            o for o in optimizers if not (o.built or any(o is each for each in inner))
        ]
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
            made = optimizers_of(innermost(unbuilt[0]))
            optimizers = [
                *optimizers,
                *(o for o in made if not any(o is each for each in optimizers)),
            ]
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

        For a `LossScaleOptimizer` this is the inner one. The optimizers of a
        `MultiOptimizer` are sent separately.

        Returns:
            Whether the placement of its variables has changed.
        """
        optimizer = innermost(optimizer)
        if optimizers_of(optimizer):
            return False
        _check(optimizer)
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
            frozenset(s for own in slots.values() for s in own if s in self._unsharded),
        )
        pickled = cloudpickle.dumps(make)
        servers = range(len(self._servers))
        self._servers.request_all(
            "optimizer", dict.fromkeys(servers, (number, pickled))
        )
        self._sent[number] = len(optimizer.variables)
        return has_moved

    def _place(self, optimizer: Any, trained: dict[int, Any]) -> bool:
        """Places variables without a reference variable; returns whether one moved."""
        registry = self._registry
        unplaced, has_moved = [], False
        for variable in optimizer.variables:
            description = registry.describe(variable)
            if (
                description.kind == "scalar"
                or registry.references.get(description.number) in trained
            ):
                continue
            if description.shape:
                unplaced.append(variable)
            else:
                registry.replicate(variable)
                has_moved = True
        users = self._users(optimizer, trained, unplaced) if unplaced else []
        for variable, own in zip(unplaced, users, strict=True):
            # Unused variables stay where they are.
            if own:
                home = self._home(optimizer, variable, own)
                self._unsharded.add(registry.colocate(variable, home))
                has_moved = True
        return has_moved

    def _users(
        self, optimizer: Any, trained: dict[int, Any], unplaced: list[Any]
    ) -> list[list[Any]]:
        """The trained variables that use each unplaced one in their traced updates."""
        users: list[list[Any]] = [[] for _ in unplaced]
        for variable in trained.values():
            try:
                used = used_by_update(optimizer, variable, unplaced)
            except Exception as error:
                description = self._registry.describe(unplaced[0])
                raise InvalidArgumentError(
                    f"{_not_from_reference(optimizer, description)}. Its trained "
                    "variables could not be determined: tracing the "
                    f"update of {variable.path!r} with shapes only failed with "
                    f"{type(error).__name__}: {error}. Write the update with "
                    "`keras.ops`, or create the variable by "
                    "`add_variable_from_reference`."
                ) from error
            for own, each in zip(users, unplaced, strict=True):
                if any(each is other for other in used):
                    own.append(variable)
        return users

    def _home(
        self, optimizer: Any, variable: Any, users: list[Any]
    ) -> VariableDescription:
        """The trained variable that determines the server of another one."""
        description = self._registry.describe(variable)
        if len(users) > 1:
            raise InvalidArgumentError(
                f"{_not_from_reference(optimizer, description)}. The updates of "
                f"{len(users)} variables use it, among them {users[0].path!r} and "
                f"{users[1].path!r}. Parameter servers update each variable on its own "
                "server, without the others. Use one slot per trained variable, or "
                "scalars, which every server has; or train with ks.MirroredStrategy."
            )
        home = self._registry.describe(users[0])
        if len(home.shards) > 1:
            raise InvalidArgumentError(
                f"Optimizer {type(optimizer).__name__} computes with all rows of a "
                f"variable at once: it has the slot {description.path!r} of shape "
                f"{description.shape} for {home.path!r}, which is sharded into "
                f"{len(home.shards)} shards. Let `variable_partitioner` return 1 for "
                "its shape, or use an optimizer that updates each row independently, "
                "such as Adam."
            )
        return home

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
    clips = optimizer.clipnorm or optimizer.global_clipnorm
    if optimizer.gradient_accumulation_steps and clips:
        raise InvalidArgumentError(
            "`gradient_accumulation_steps` with `clipnorm` or `global_clipnorm` "
            "needs the norms of accumulated gradients, and a parameter server has "
            "only some of the variables. Use `clipvalue`, or larger batches."
        )


def _not_from_reference(optimizer: Any, description: VariableDescription) -> str:
    return (
        f"Optimizer {type(optimizer).__name__} has a variable of shape "
        f"{description.shape}, {description.path!r}, that was not created by "
        "`add_variable_from_reference`"
    )
