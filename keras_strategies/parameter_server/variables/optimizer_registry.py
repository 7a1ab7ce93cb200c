"""Optimizers on their way to the parameter servers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import cloudpickle

from keras_strategies import keras_compat
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.parameter_server.server.optimizer_spec import (
    make_spec,
)
from keras_strategies.parameter_server.variables.optimizer_wrappers import innermost
from keras_strategies.parameter_server.wire.variable_description import Described

if TYPE_CHECKING:
    from keras_strategies.parameter_server.variables.variable_registry import Registry
    from keras_strategies.parameter_server.wire.server_connections import Servers


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
        # Slots that are of a variable and not of its rows.
        self._whole: set[int] = set()

    def send(self, optimizer: Any, is_strategy: Any) -> bool:
        """Gives the servers an optimizer, unless they have it.

        Of one that scales losses it is the one that it wraps. The optimizers of a
        `MultiOptimizer` are sent by themselves.

        Returns:
            Whether variables of it are in other places since.
        """
        optimizer = innermost(optimizer)
        if keras_compat.optimizers_of(optimizer):
            return False
        _check(optimizer)
        registry = self._registry
        number = registry.number_of(optimizer)
        if self._sent.get(number) == len(optimizer.variables):
            return False
        trained = {
            registry.describe(variable).number: variable
            for variable in keras_compat.trained_variables(optimizer)
        }
        has_moved = self._place(optimizer, trained)
        blob, _, _, _ = registry.dump(optimizer, is_strategy)
        slots: dict[int, list[int]] = {each: [] for each in trained}
        scalars = []
        for variable in optimizer.variables:
            about = registry.describe(variable)
            reference = registry.references.get(about.number)
            if reference in slots:
                slots[reference].append(about.number)
            elif about.kind == "scalar":
                scalars.append(about.number)
        decays = {
            each: keras_compat.weight_decay_applies(optimizer, variable)
            for each, variable in trained.items()
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
            frozenset(s for own in slots.values() for s in own if s in self._whole),
        )
        pickled = cloudpickle.dumps(make)
        servers = range(len(self._servers))
        self._servers.ask_all("optimizer", dict.fromkeys(servers, (number, pickled)))
        self._sent[number] = len(optimizer.variables)
        return has_moved

    def _place(self, optimizer: Any, trained: dict[int, Any]) -> bool:
        """Puts what has no place by its making where it is used; whether there was."""
        registry = self._registry
        unplaced, has_moved = [], False
        for variable in optimizer.variables:
            about = registry.describe(variable)
            if (
                about.kind == "scalar"
                or registry.references.get(about.number) in trained
            ):
                continue
            if about.shape:
                unplaced.append(variable)
            else:
                registry.put_everywhere(variable)
                has_moved = True
        users = self._users(optimizer, trained, unplaced) if unplaced else []
        for variable, own in zip(unplaced, users, strict=True):
            # What no update uses may be anywhere.
            if own:
                home = self._home(optimizer, variable, own)
                self._whole.add(registry.put_with(variable, home))
                has_moved = True
        return has_moved

    def _users(
        self, optimizer: Any, trained: dict[int, Any], unplaced: list[Any]
    ) -> list[list[Any]]:
        """For each variable those whose updates use it, found by tracing them."""
        users: list[list[Any]] = [[] for _ in unplaced]
        for variable in trained.values():
            try:
                used = keras_compat.used_by_update(optimizer, variable, unplaced)
            except Exception as error:
                about = self._registry.describe(unplaced[0])
                raise InvalidArgumentError(
                    f"{_keeps(optimizer, about)}, and which variables it is for could "
                    f"not be found out: the update of {variable.path!r} fails where "
                    "there are shapes and no numbers, with "
                    f"{type(error).__name__}: {error}. Write it with `keras.ops`, or "
                    "make the variable by `add_variable_from_reference`."
                ) from error
            for own, each in zip(users, unplaced, strict=True):
                if any(each is other for other in used):
                    own.append(variable)
        return users

    def _home(self, optimizer: Any, variable: Any, users: list[Any]) -> Described:
        """The trained variable that another one is to be with."""
        about = self._registry.describe(variable)
        if len(users) > 1:
            raise InvalidArgumentError(
                f"{_keeps(optimizer, about)}, which the updates of {len(users)} "
                f"variables use, of {users[0].path!r} and {users[1].path!r} among "
                "them. Parameter servers update each variable where it is, without the "
                "others. Keep one for each variable that is trained, or scalars, which "
                "every server has; or train with ks.MirroredStrategy."
            )
        home = self._registry.describe(users[0])
        if len(home.parts) > 1:
            raise InvalidArgumentError(
                f"Optimizer {type(optimizer).__name__} computes with all rows of a "
                f"variable together: it keeps {about.path!r} of shape {about.shape} "
                f"for {home.path!r}, which is cut into {len(home.parts)} parts. Let "
                "`variable_partitioner` return 1 for its shape, or use an optimizer "
                "that updates each row by itself, such as Adam."
            )
        return home

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


def _keeps(optimizer: Any, about: Described) -> str:
    return (
        f"Optimizer {type(optimizer).__name__} keeps a variable of shape "
        f"{about.shape}, {about.path!r}, which was not made by "
        "`add_variable_from_reference`"
    )
