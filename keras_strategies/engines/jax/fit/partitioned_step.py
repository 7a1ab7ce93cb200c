"""Steps as two programs: on the compute devices, and on the device of the variables.

# Partition

A compiled program runs on one set of devices, so a step with central variables is two
programs. The step is traced once, with `optimizer.stateless_apply` as one marked
equation. That update and all equations that depend on it run on the device of the
variables; the others run on the mesh of the compute devices. Each program reads only
the state that its equations use, and returns only the state that they change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

# `step(state, batch)` returns outputs of any structure and the new state, a flat list.
FlatStep = Callable[[list[Any], Any], tuple[Any, list[Any]]]

_UPDATE = "keras_strategies_update"


@contextlib.contextmanager
def marked_update(optimizer: Any) -> Iterator[None]:
    """Makes each call of `optimizer.stateless_apply` one equation of a trace."""
    apply = optimizer.stateless_apply

    def marked(*args: Any, **kwargs: Any) -> Any:
        # A function for each call: JAX caches the trace of a function.
        def update(*args: Any, **kwargs: Any) -> Any:
            return apply(*args, **kwargs)

        update.__name__ = _UPDATE
        return jax.jit(update)(*args, **kwargs)

    # Bypasses Keras's tracking of attributes.
    object.__setattr__(optimizer, "stateless_apply", marked)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "stateless_apply")


@dataclass(frozen=True)
class _Part:
    """One of the two programs.

    Args:
        function: callable of the values of `inputs`; returns those of `outputs`.
        inputs: the arguments of the step, and results of the other program, that the
            equations use.
        outputs: the results that this program computes.
    """

    function: Callable[..., list[Any]]
    inputs: list[Var]
    outputs: list[Any]


def _part(
    traced: ClosedJaxpr, equations: Sequence[JaxprEqn], outputs: Sequence[Any]
) -> _Part:
    known = _computed(equations) | set(traced.jaxpr.constvars)
    used = [var for equation in equations for var in equation.invars]
    inputs = [var for var in _variables([*used, *outputs]) if var not in known]
    part = Jaxpr(traced.jaxpr.constvars, inputs, list(outputs), list(equations))
    return _Part(jaxpr_as_fun(ClosedJaxpr(part, traced.consts)), inputs, list(outputs))


def _variables(atoms: Iterable[Any]) -> list[Var]:
    """The variables among atoms, without literals and repetitions."""
    return list(dict.fromkeys(atom for atom in atoms if isinstance(atom, Var)))


def _computed(equations: Sequence[JaxprEqn]) -> set[Any]:
    return {var for equation in equations for var in equation.outvars}


def _divided(jaxpr: Jaxpr) -> tuple[list[JaxprEqn], list[JaxprEqn]]:
    """The equations before an update, and those that depend on one."""
    before: list[JaxprEqn] = []
    after: list[JaxprEqn] = []
    dependent: set[Any] = set()
    for equation in jaxpr.eqns:
        is_update = equation.params.get("name") == _UPDATE
        used = {var for var in equation.invars if isinstance(var, Var)}
        if is_update or used & dependent:
            after.append(equation)
            dependent.update(equation.outvars)
        else:
            before.append(equation)
    return before, after


class PartitionedStep:
    """A step for batches of one shape, as a program on a mesh and one elsewhere.

    Args:
        step: the step, which is traced once.
        replicated: the sharding of arrays on the mesh.
        home: the sharding of the variables between steps.
        state: arrays like the state.
        batch: a batch like those of the step.
    """

    def __init__(
        self,
        step: FlatStep,
        replicated: jax.sharding.Sharding,
        home: jax.sharding.Sharding,
        state: Sequence[jax.Array],
        batch: Any,
    ):
        traced, shapes = jax.make_jaxpr(step, return_shape=True)(list(state), batch)
        jaxpr, count = traced.jaxpr, len(state)
        self._home = home
        self._structure = jax.tree.structure(shapes[0])
        self._arguments = list(jaxpr.invars)
        self._constants = dict(zip(jaxpr.constvars, traced.consts, strict=True))
        outputs = jaxpr.outvars[: len(jaxpr.outvars) - count]
        old, new = jaxpr.invars[:count], jaxpr.outvars[len(outputs) :]
        #: The indices of the state arrays that the step changes.
        self.changes = [i for i in range(count) if new[i] is not old[i]]
        self._outputs = outputs
        self._new = {i: new[i] for i in self.changes}

        before, after = _divided(jaxpr)
        early, late = _computed(before), _computed(after)
        results = _variables([*outputs, *self._new.values()])
        self._update = _part(traced, after, [var for var in results if var in late])
        needed = [*results, *self._update.inputs]
        kept = [var for var in dict.fromkeys(needed) if var in early]
        self._compute = _part(traced, before, kept)
        number = {var: i for i, var in enumerate(old)}
        #: The indices of the state arrays that the program on the mesh reads.
        self.reads = [number[var] for var in self._compute.inputs if var in number]

        stays = {*self._update.inputs, *_variables(self._new.values())}
        stays -= {*_variables(outputs)}
        self._on_mesh = jax.jit(
            self._compute.function,
            out_shardings=[replicated if var in stays else None for var in kept],
        )
        replaced = {old[i] for i in self.changes if late & {*_variables([new[i]])}}
        #: The program on the device of the variables.
        self.at_home = self._home_program(replaced - {*results})
        #: Pairs of a state array and of the result of `at_home` that replaces it.
        self.updates = [
            (i, position)
            for position, var in enumerate(self._update.outputs)
            for i in self.changes
            if new[i] is var
        ]

    def _home_program(self, donated: set[Var]) -> Callable[..., Any]:
        inputs = enumerate(self._update.inputs)
        return jax.jit(
            self._update.function,
            donate_argnums=[i for i, var in inputs if var in donated],
            out_shardings=self._home,
        )

    def compute(
        self, state: Sequence[jax.Array], copies: Sequence[jax.Array], batch: Any
    ) -> dict[Any, Any]:
        """Runs the program on the mesh; returns the known values of the trace.

        Args:
            state: all state arrays.
            copies: copies on the mesh of `state[i]` for each `i` of `reads`.
            batch: the batch, on the mesh.
        """
        arguments = [*state, *jax.tree.leaves(batch)]
        values = self._constants | dict(zip(self._arguments, arguments, strict=True))
        on_mesh = values | {
            self._arguments[i]: copy for i, copy in zip(self.reads, copies, strict=True)
        }
        results = self._on_mesh(*(on_mesh[var] for var in self._compute.inputs))
        values.update(zip(self._compute.outputs, results, strict=True))
        return values

    def update_arguments(self, values: dict[Any, Any]) -> list[Any]:
        """The arguments of `at_home`; empty without an update."""
        arguments = [values[var] for var in self._update.inputs]
        away = [i for i, array in enumerate(arguments) if array.sharding != self._home]
        moved = jax.device_put([arguments[i] for i in away], self._home)
        for i, array in zip(away, moved, strict=True):
            arguments[i] = array
        return arguments

    def new_state(self, state: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
        """The state after the program on the mesh, before `updates`."""
        new = list(state)
        for i, var in self._new.items():
            if isinstance(var, Literal) or var in values:
                new[i] = _value(var, values)
        return new

    def outputs(self, values: dict[Any, Any], updated: Sequence[Any]) -> Any:
        """The step's outputs, from the results of both programs."""
        values = values | dict(zip(self._update.outputs, updated, strict=True))
        flat = [_value(var, values) for var in self._outputs]
        return jax.tree.unflatten(self._structure, flat)


def _value(var: Any, values: dict[Any, Any]) -> Any:
    return jax.numpy.asarray(var.val) if isinstance(var, Literal) else values[var]
