"""Packing of small tensors into few messages."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def pack_indices(
    dtypes: Sequence[Hashable],
    nbytes: Sequence[int],
    bytes_per_pack: int,
) -> list[list[int]]:
    """Packs of neighbouring tensors of one dtype and about equal size.

    Args:
        dtypes: the dtype of each tensor, or what else a pack has one of.
        nbytes: the size of each tensor, in bytes.
        bytes_per_pack: int, bytes; closes a pack that has reached this size.

    Returns:
        list of lists of indices, in order; each index once. A change of dtype closes a
        pack.

    >>> pack_indices(["float32"] * 4, [4, 4, 4, 4], 8)
    [[0, 1], [2, 3]]
    """
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
