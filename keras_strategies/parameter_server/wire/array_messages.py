"""Messages between the processes of a cluster: a small header, and arrays beside it.

A message is a structure of plain values and NumPy arrays. Pickle's protocol 5 hands
out the memory of arrays instead of copying it, so that a message is sent from where
its arrays lie and is read where it has arrived.

Peers have proved who they are before a message is read (`transport`): whoever can
send one could run any code anyway, since closures are code.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

Buffer = Any

#: Arrays of fewer bytes are in the header: a part of its own costs more than the copy.
_SMALL_BYTES = 4096


def pack(message: Any) -> list[Buffer]:
    """The parts of a message: a header, then the memory of its arrays.

    Args:
        message: anything that pickle takes. Arrays have to be contiguous to travel
            without a copy, and unchanged until the message has been sent.
    """
    arrays: list[memoryview] = []

    def goes_inside(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < _SMALL_BYTES:
            return True
        arrays.append(memory)
        return False

    header = pickle.dumps(message, protocol=5, buffer_callback=goes_inside)
    return [header, *arrays]


def unpack(parts: Sequence[Buffer]) -> Any:
    """The message; its arrays are read-only views of the parts."""
    return pickle.loads(parts[0], buffers=parts[1:])


def nbytes(parts: Sequence[Buffer]) -> int:
    """int, the bytes of a packed message."""
    return sum(
        part.nbytes if isinstance(part, memoryview) else len(part) for part in parts
    )
