"""Copies on a mesh of arrays that are on another device."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from keras_strategies.keras_compat.variables.values import IdMap


class MeshCopies:
    """Replicated copies of arrays that are on another device.

    A cached copy lives as long as its original. Updates make new arrays, so a copy is
    never out of date.

    Args:
        replicated: the sharding of the copies.
    """

    def __init__(self, replicated: jax.sharding.Sharding):
        self._replicated = replicated
        self._copies: IdMap[jax.Array] = IdMap()

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
                self._copies.set(arrays[i], copy)
        return [copy for copy in known if copy is not None]

    def _known(self, array: jax.Array) -> jax.Array | None:
        is_output = array.sharding == self._replicated
        return array if is_output else self._copies.get(array)
