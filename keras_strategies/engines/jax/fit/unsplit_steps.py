"""Steps with too little arithmetic to be split: one device of the mesh computes them.

# State

Between loops of Keras, variables have a copy on each device. A loop on one device
begins with the copies there, which are not moved, and continues with its results. Keras
copies these to all devices when it assigns the variables: at the end of an epoch, or
where a callback reads them. `train_on_batch`, which assigns them after each step, is
split.

# Choice of the devices

The first batch of a loop decides, by `runtime/data_parallel/arithmetic.py`. A later
batch that is worth splitting moves the state to the mesh, where the loop stays, so that
the state is moved at most once.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from keras_strategies.engines.jax.batch_placement import DevicePlacer, MeshPlacer
from keras_strategies.engines.jax.fit.compiled_steps import (
    DONATED,
    CompiledStep,
    ScannedStep,
    Step,
    unshared,
)
from keras_strategies.engines.jax.fit.step_cost import arithmetic_of
from keras_strategies.input.row_splits import check_batch
from keras_strategies.keras_compat.backends.keras_on_jax import variables_are_empty
from keras_strategies.runtime.data_parallel.unsplit_calls import UnsplitCalls

_METHODS = {"train": "fit", "test": "evaluate", "predict": "predict"}


@dataclass(frozen=True)
class _Program:
    """A step on one device, for batches of one shape.

    Args:
        step: the step.
        kept: for each array of the state, whether the step neither changes nor donates
            it.
    """

    step: CompiledStep
    kept: list[list[bool]]

    @property
    def keeps(self) -> bool:
        """Whether any array of the state is kept."""
        return any(map(any, self.kept))

    def after(self, state: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        """The results of a step; kept arrays with their copies on all devices."""
        outputs, new = found
        if not self.keeps:
            return outputs, new
        return outputs, tuple(
            [old if is_kept else own for old, own, is_kept in zip(*group, strict=True)]
            for group in zip(state, new, self.kept, strict=True)
        )


class StepBySize(ScannedStep):
    """A step on one device where it is too small to be split, or else on the mesh.

    Args:
        model: the model.
        kind: str, "train", "test" or "predict".
        split: the step on the mesh.
        placer: the transfer of batches to the mesh.
        replicated: the sharding of variables on the mesh.
        unsplit_calls: the record of the batches that one device computes.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        split: CompiledStep,
        placer: MeshPlacer,
        replicated: jax.NamedSharding,
        unsplit_calls: UnsplitCalls,
    ):
        self.model = model
        self._kind = kind
        self._split = split
        self._placer = placer
        self._replicated = replicated
        self._unsplit_calls = unsplit_calls
        home = replicated.mesh.devices.flat[0]
        self._home_placer = DevicePlacer(home)
        self._home = jax.sharding.SingleDeviceSharding(home)
        self._programs: dict[Any, _Program | None] = {}
        # Whether the current loop runs on the mesh.
        self._is_split = False
        # Whether all arrays of the loop's state are on one device.
        self._is_home = False

    def begin(self, state: Any) -> Any:
        """The state for the first step of a loop, from the variables."""
        # `train_on_batch` assigns all variables after each step, which takes longer for
        # copies on all devices than to split a batch.
        assigns = not variables_are_empty(self.model)
        self._is_split = self._kind == "train" and assigns
        self._is_home = False
        return unshared(state)

    def __call__(self, state: Any, batch: Any) -> tuple[Any, Any]:
        program = self._unsplit(state, batch)
        if program is None:
            placed = self._placer.place(batch)
            return self._split(self._on_mesh(state), placed)
        placed = self._home_placer.place(batch)
        found = program.step(self._at_home(state), placed)
        self._is_home = not program.keeps
        return program.after(state, found)

    def several(self, state: Any, batches: Any, count: int) -> tuple[Any, Any]:
        program = self._unsplit(state, batches[0])
        if program is None:
            placed = self._placer.place_several(batches)
            return self._split.several(self._on_mesh(state), placed, count)
        placed = self._home_placer.place_several(batches)
        found = program.step.several(self._at_home(state), placed, count)
        self._is_home = not program.keeps
        return program.after(state, found)

    def _unsplit(self, state: Any, batch: Any) -> _Program | None:
        """The program on one device; None to split the batch."""
        if self._is_split:
            return None
        key = _key(state, batch)
        if key not in self._programs:
            program = self._programs[key] = self._program(state, batch)
            if program is not None:
                self._unsplit_calls.add(self.model, _METHODS[self._kind], key[0])
        return self._programs[key]

    def _program(self, state: Any, batch: Any) -> _Program | None:
        check_batch(batch)
        own = [[_abstract(a, self._replicated) for a in group] for group in state]
        given = jax.tree.map(
            lambda leaf: _abstract(leaf, self._placer.sharding(leaf.shape)), batch
        )
        traced = self._split.traced(own, given)
        jaxpr = traced.jaxpr.jaxpr
        if arithmetic_of(jaxpr).worth_splitting(self._replicated.num_devices):
            return None
        step = CompiledStep(self.model, self._kind, _replayed(traced, self._home))
        return _Program(step, _kept(self._kind, own, jaxpr))

    def _at_home(self, state: Any) -> Any:
        if self._is_home:
            return state
        return tuple([self._own(array) for array in group] for group in state)

    def _own(self, array: jax.Array) -> jax.Array:
        if len(array.sharding.device_set) > 1:
            return array.addressable_data(0)
        return array if array.committed else jax.device_put(array, self._home)

    def _on_mesh(self, state: Any) -> Any:
        if self._is_split:
            return state
        self._is_split, self._is_home = True, False
        return jax.device_put(tuple(state), self._replicated)


def _key(state: Any, batch: Any) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(batch)
    shapes = tuple((np.shape(leaf), getattr(leaf, "dtype", None)) for leaf in leaves)
    rows = shapes[0][0][0] if shapes and shapes[0][0] else 0
    return (rows, structure, shapes, *map(len, state))


def _abstract(array: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.ShapeDtypeStruct(np.shape(array), dtype, sharding=sharding)


def _replayed(traced: jax.stages.Traced, home: jax.sharding.Sharding) -> Step:
    """The traced step, for arrays on one device."""
    constants = [
        jax.device_put(constant, home) if isinstance(constant, jax.Array) else constant
        for constant in traced.jaxpr.consts
    ]
    function = jaxpr_as_fun(ClosedJaxpr(traced.jaxpr.jaxpr, constants))
    structure = jax.tree.structure(traced.out_info)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        results = function(*jax.tree.leaves((*state, batch)))
        found: tuple[Any, Any] = jax.tree.unflatten(structure, results)
        return found

    return step


def _kept(kind: str, state: Sequence[Sequence[Any]], jaxpr: Jaxpr) -> list[list[bool]]:
    """For each array, whether a step neither changes nor donates it."""
    count = sum(map(len, state))
    unchanged = iter(map(operator.is_, jaxpr.invars, jaxpr.outvars[-count:]))
    return [
        [
            is_kept and i not in DONATED[kind]
            for is_kept in islice(unchanged, len(group))
        ]
        for i, group in enumerate(state)
    ]
