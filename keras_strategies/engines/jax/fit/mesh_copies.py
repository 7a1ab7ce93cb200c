"""Copies on a mesh of arrays that are on another device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import jax


class MeshCopies:
    """Replicated copies of arrays that are on another device.

    A cached copy lives as long as its original. Updates make new arrays, so a copy is
    never out of date.

    Args:
        replicated: the sharding of the copies.
    """

    def __init__(self, replicated: jax.sharding.Sharding):
        self._replicated = replicated
        self._cache: dict[int, tuple[weakref.ref[jax.Array], jax.Array]] = {}

    def get(
        self, arrays: Sequence[jax.Array], cached: Sequence[bool]
    ) -> list[jax.Array]:
        """The arrays on the mesh; missing copies are made in one transfer.

        Args:
            arrays: the arrays.
            cached: for each array, whether to cache its copy.
        """
        known = [self._known(array) for array in arrays]
        missing = [i for i, copy in enumerate(known) if copy is None]
        copied = jax.device_put([arrays[i] for i in missing], self._replicated)
        for i, copy in zip(missing, copied, strict=True):
            known[i] = copy
            if cached[i]:
                self._add(arrays[i], copy)
        return [copy for copy in known if copy is not None]

    def _known(self, array: jax.Array) -> jax.Array | None:
        if array.sharding == self._replicated:
            return array  # The output of a step.
        reference, copy = self._cache.get(id(array), (None, None))
        return copy if reference is not None and reference() is array else None

    def _add(self, array: jax.Array, copy: jax.Array) -> None:
        key = id(array)
        remove = weakref.ref(array, lambda _: self._cache.pop(key, None))
        self._cache[key] = (remove, copy)
