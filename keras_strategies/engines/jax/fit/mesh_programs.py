"""Programs on a mesh for variables that live elsewhere."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

# `step(state, batch)` returns outputs of any structure, a list of extra arrays, and
# the new state; states are flat lists.
FlatStep = Callable[[list[Any], Any], tuple[Any, list[Any], list[Any]]]


class MeshCopies:
    """MeshCopies, on every device of a mesh, of arrays that lie elsewhere.

    A copy that is kept serves for as long as its original exists. Updates make new
    arrays, so it is never out of date.

    Args:
        whole: the sharding of an array that every device of the mesh has.
    """

    def __init__(self, whole: jax.sharding.Sharding):
        self._whole = whole
        self._kept: dict[int, tuple[weakref.ref[jax.Array], jax.Array]] = {}

    def get(self, arrays: Sequence[jax.Array], *, keep: bool) -> list[jax.Array]:
        """The arrays on the mesh, those that are missing copied in one transfer."""
        known = [self._known(array) for array in arrays]
        missing = [a for a, copy in zip(arrays, known, strict=True) if copy is None]
        copied = jax.device_put(missing, self._whole)
        if keep:
            for array, copy in zip(missing, copied, strict=True):
                self._keep(array, copy)
        rest = iter(copied)
        return [next(rest) if copy is None else copy for copy in known]

    def _known(self, array: jax.Array) -> jax.Array | None:
        if array.sharding == self._whole:
            return array  # A step left it there.
        reference, copy = self._kept.get(id(array), (None, None))
        return copy if reference is not None and reference() is array else None

    def _keep(self, array: jax.Array, copy: jax.Array) -> None:
        key = id(array)
        forget = weakref.ref(array, lambda _: self._kept.pop(key, None))
        self._kept[key] = (forget, copy)


@dataclass(frozen=True)
class _DataFlow:
    """Which of a traced step's state arrays are read, and which come out new."""

    reads: list[int]
    changes: list[int]

    @classmethod
    def of(cls, traced: ClosedJaxpr, count: int) -> _DataFlow:
        """The flow of a step whose first inputs and last outputs are its state."""
        old = traced.jaxpr.invars[:count]
        results = traced.jaxpr.outvars
        new = results[len(results) - count :]
        changes = [i for i in range(count) if new[i] is not old[i]]
        atoms = [atom for equation in traced.jaxpr.eqns for atom in equation.invars]
        atoms += results[: len(results) - count] + [new[i] for i in changes]
        used = {atom for atom in atoms if isinstance(atom, Var)}
        return cls([i for i in range(count) if old[i] in used], changes)


class TracedStep:
    """A compiled step that gets the state it reads and returns what it changes.

    Args:
        step: the step, which is traced once.
        whole: the sharding of an array that every device of the mesh has.
        state: arrays like those that the step will get.
        batch: a batch like those that the step will get.
    """

    def __init__(
        self,
        step: FlatStep,
        whole: jax.sharding.Sharding,
        state: Sequence[jax.Array],
        batch: Any,
    ):
        traced, shapes = jax.make_jaxpr(step, return_shape=True)(list(state), batch)
        flow = _DataFlow.of(traced, len(state))
        self.reads, self._changes = flow.reads, flow.changes
        outputs, extra = shapes[:2]
        results = jax.tree.structure((outputs, extra))
        count = len(jax.tree.leaves((outputs, extra)))
        run = jaxpr_as_fun(traced)
        templates = [(array.shape, array.dtype) for array in state]

        def program(read: list[Any], batch: Any) -> tuple[Any, Any, list[Any]]:
            # The zeros stand where nothing looks, and the compiler removes them.
            full = [jax.numpy.zeros(shape, dtype) for shape, dtype in templates]
            for i, value in zip(flow.reads, read, strict=True):
                full[i] = value
            flat = run(*full, *jax.tree.leaves(batch))
            outputs, extra = jax.tree.unflatten(results, flat[:count])
            return outputs, extra, [flat[count + i] for i in flow.changes]

        self._program = jax.jit(program, out_shardings=(None, whole, whole))

    def __call__(
        self, state: Sequence[jax.Array], read: list[jax.Array], batch: Any
    ) -> tuple[Any, list[Any], list[Any]]:
        """The step's results, with state arrays that do not change as they are.

        Args:
            state: all state arrays.
            read: copies on the mesh of `state[i]` for each `i` of `reads`.
            batch: the batch, on the mesh.
        """
        outputs, extra, changed = self._program(read, batch)
        new = list(state)
        for i, value in zip(self._changes, changed, strict=True):
            new[i] = value
        return outputs, extra, new


class MeshProgram:
    """A `TracedStep` for each shape of a batch."""

    def __init__(self, step: FlatStep, whole: jax.sharding.Sharding):
        self._step = step
        self._whole = whole
        self._traced: dict[Any, TracedStep] = {}

    def for_batch(self, state: Sequence[jax.Array], batch: Any) -> TracedStep:
        """The program for batches like this one."""
        arrays, structure = jax.tree.flatten(batch)
        key = (structure, *(array.aval for array in arrays))
        traced = self._traced.get(key)
        if traced is None:
            traced = TracedStep(self._step, self._whole, state, batch)
            self._traced[key] = traced
        return traced
