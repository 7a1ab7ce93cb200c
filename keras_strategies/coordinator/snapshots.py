"""What a parameter server writes to its folder, so that another process can go on.

A *snapshot* is everything at one moment: variables and the names of the updates that
they had, in one file that is there whole or not at all. What is begun after it, parts
of variables and optimizers, is appended to a *journal*, so that a server that dies
between two snapshots comes back with all of its parts; only updates are lost.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from keras_strategies.coordinator.store import Store
from keras_strategies.errors import PeerError


class Snapshots:
    """The files of one parameter server.

    Args:
        folder: where they are.
        index: int, the number of the server.
    """

    def __init__(self, folder: str, index: int):
        self._snapshot = Path(folder) / f"ps-{index}.snapshot"
        self._journal = Path(folder) / f"ps-{index}.journal"

    @property
    def path(self) -> Path:
        """The snapshot's file."""
        return self._snapshot

    def save(self, store: Store, extra: Any) -> None:
        """Writes a snapshot, by renaming a complete one; the journal begins anew.

        Args:
            store: what to write.
            extra: what else the file is to hold.
        """
        part = self._snapshot.with_name(f"{self._snapshot.name}.{os.getpid()}.part")
        with part.open("wb") as file:
            head = (store.version, store.applied, list(store.arrays), extra)
            pickle.dump(head, file, protocol=5)
            for array in store.arrays.values():
                # As bytes: dtypes such as bfloat16 are not NumPy's own.
                pickle.dump((array.shape, array.dtype), file, protocol=5)
                file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._snapshot)
        # What is in both is taken from the snapshot.
        self._journal.unlink(missing_ok=True)

    def note(self, kind: str, value: Any) -> None:
        """Appends something to the journal that has begun since the snapshot."""
        with self._journal.open("ab") as file:
            pickle.dump((kind, value), file, protocol=5)

    def load(self) -> tuple[Store, Any] | None:
        """The store as the last snapshot has it, and its extra; None without one."""
        if not self._snapshot.exists():
            return None
        store = Store()
        with self._snapshot.open("rb") as file:
            version, applied, keys, extra = pickle.load(file)
            store.version, store.applied = version, applied
            for key in keys:
                shape, dtype = pickle.load(file)
                array = np.empty(shape, dtype)
                view = array.reshape(-1).view(np.uint8)
                if array.size and file.readinto(view.data) != array.nbytes:
                    raise PeerError(f"The snapshot {self._snapshot} is cut off.")
                store.arrays[key] = array
        return store, extra

    def journal(self) -> Iterator[tuple[str, Any]]:
        """What has begun since the snapshot."""
        if not self._journal.exists():
            return
        with self._journal.open("rb") as file:
            while True:
                try:
                    yield pickle.load(file)
                except (EOFError, pickle.UnpicklingError):
                    # The process died while it wrote; nobody was told of this part.
                    return

    def clear(self) -> None:
        """Removes the files, of another cluster that had this folder."""
        self._snapshot.unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)
