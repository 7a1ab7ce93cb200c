"""Packing of small tensors into few messages."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

from keras_strategies.errors import InvalidArgumentError


def pack_indices(
    dtypes: Sequence[Hashable],
    nbytes: Sequence[int],
    *,
    num_packs: int = 0,
    bytes_per_pack: int = 0,
) -> list[list[int]]:
    """Packs of neighbouring tensors of one dtype and about equal size.

    Args:
        dtypes: the dtype of each tensor, or what else a pack has one of.
        nbytes: the size of each tensor, in bytes.
        num_packs: int, how many packs to make of all bytes; 0 for no packing.
        bytes_per_pack: int, bytes; closes a pack that has reached this size.

    Returns:
        list of lists of indices, in order; each index once. With neither limit
        every tensor is a pack of its own. A change of dtype closes a pack, so that
        there can be more packs than requested.

    >>> pack_indices(["float32"] * 4, [4, 4, 4, 4], num_packs=2)
    [[0, 1], [2, 3]]
    """
    if num_packs < 0 or bytes_per_pack < 0:
        raise InvalidArgumentError(
            "The number and the size of packs must be 0 or more. Received: "
            f"num_packs={num_packs}, bytes_per_pack={bytes_per_pack}"
        )
    if num_packs:
        bytes_per_pack = max(1, math.ceil(sum(nbytes) / num_packs))
    packs: list[list[int]] = []
    filled = 0
    for i, size in enumerate(nbytes):
        same_dtype = bool(packs) and dtypes[packs[-1][-1]] == dtypes[i]
        if same_dtype and filled < bytes_per_pack:
            packs[-1].append(i)
            filled += size
        else:
            packs.append([i])
            filled = size
    return packs
