"""Staging of shards from other servers, until all of them are complete."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from keras_strategies.errors import PeerError
from keras_strategies.parameter_server.wire.step_messages import Key


class StagedShards:
    """Copies of shards that are not used yet.

    Snapshots do not contain them: after a restart of the server they are missing, and
    the transfer begins again.
    """

    def __init__(self) -> None:
        self._arrays: dict[Key, np.ndarray] = {}

    def begin(self, key: Key, shape: tuple[int, ...], dtype: np.dtype) -> None:
        """Allocates a shard, instead of an earlier copy of it."""
        self._arrays[key] = np.empty(shape, dtype)

    def write(self, key: Key, start: int, rows: np.ndarray) -> None:
        """Writes consecutive rows of a shard, or a scalar.

        Raises:
            RuntimeError: `PeerError` if the shard has not been begun.
        """
        self._check([key])
        array = self._arrays[key]
        if array.ndim:
            array[start : start + len(rows)] = rows
        else:
            array[...] = rows

    def take(self, keys: Iterable[Key]) -> dict[Key, np.ndarray]:
        """The complete shards; the others are discarded.

        Raises:
            RuntimeError: `PeerError` if one has not been begun.
        """
        keys = list(keys)
        self._check(keys)
        found, self._arrays = {key: self._arrays[key] for key in keys}, {}
        return found

    def _check(self, keys: Iterable[Key]) -> None:
        missing = [key for key in keys if key not in self._arrays]
        if missing:
            raise PeerError(
                f"{len(missing)} shards of a transfer are missing, {missing[0]} among "
                "them: this parameter server was restarted."
            )
