"""What one parameter server holds: parts of variables, and which updates they had."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from keras_strategies.errors import PeerError
from keras_strategies.parameter_server.wire.row_arrays import Empty, take_rows
from keras_strategies.parameter_server.wire.step_messages import Key, UpdateId


@dataclass
class AppliedUpdates:
    """Which updates have been made, so that each is made once.

    A closure that is run again, because its worker died, sends the same names. Those
    of closures that are done are forgotten.
    """

    steps: dict[int, int] = field(default_factory=dict)
    #: Closures below this number are done.
    done: int = 0
    #: The last request of each process that added something outside of a closure.
    requests: dict[str, int] = field(default_factory=dict)

    def is_new(self, update: UpdateId) -> bool:
        closure, step = update
        return closure >= self.done and self.steps.get(closure, -1) < step

    def add(self, update: UpdateId) -> None:
        closure, step = update
        self.steps[closure] = step

    def is_new_request(self, sender: str, number: int) -> bool:
        """Notes a request; whether it comes for the first time."""
        if self.requests.get(sender, -1) >= number:
            return False
        self.requests[sender] = number
        return True

    def discard_below(self, closure: int) -> None:
        if closure > self.done:
            self.done = closure
            self.steps = {c: s for c, s in self.steps.items() if c >= closure}


class VariableStore:
    """Arrays by their keys, in memory that is updated in place where possible."""

    def __init__(self) -> None:
        self.arrays: dict[Key, np.ndarray] = {}
        self.applied = AppliedUpdates()
        #: Counts the updates that were made.
        self.version = 0

    def create(self, key: Key, value: np.ndarray) -> None:
        """Begins a part. One that is there stays: requests may come twice."""
        if key not in self.arrays:
            array = np.asarray(value, order="C")
            # What has arrived is a view of the message.
            is_own = array.flags.owndata and array.flags.writeable
            self.arrays[key] = array if is_own else np.array(array)

    def get(self, key: Key) -> np.ndarray:
        """The array of a part.

        Raises:
            RuntimeError: `PeerError` if there is no such part.
        """
        try:
            return self.arrays[key]
        except KeyError:
            raise PeerError(
                f"This parameter server has no shard {key}; it has "
                f"{len(self.arrays)} shards."
            ) from None

    def own(self, key: Key) -> np.ndarray:
        """The array of a part, to be changed in place.

        After an update it may be a framework's memory, which is read-only.
        """
        array = self.get(key)
        if not array.flags.writeable:
            array = self.arrays[key] = np.array(array)
        return array

    def write(self, key: Key, value: np.ndarray, start: int = 0) -> None:
        """Sets consecutive rows of a part, or all of a scalar."""
        array = self.own(key)
        if array.ndim == 0:
            array[...] = value
        else:
            array[start : start + len(value)] = value

    def add(self, key: Key, delta: np.ndarray) -> None:
        """Adds to a part."""
        array = self.own(key)
        if array.dtype == bool:
            array[...] = delta
        else:
            array += delta

    def rows(
        self, key: Key, ids: np.ndarray, count: int, empty: Empty | None = None
    ) -> np.ndarray:
        """Copies of some rows of a part, as `take_rows`."""
        return take_rows(self.get(key), ids, count, empty)

    @property
    def nbytes(self) -> int:
        """int, bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays.values())
