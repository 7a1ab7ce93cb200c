"""Packed messages: a frame with a pickled header, and a frame for each large array.

Pickle's protocol 5 exposes the memory of arrays instead of copying it, so that arrays
are sent from their own memory and read from that of the message.

Peers are authenticated before a message is unpickled (`cluster_keys`); messages contain
code anyway, the scheduled functions.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

Buffer = Any

#: Smaller arrays are copied into the header, which costs less than a frame.
_SMALL_BYTES = 4096
#: Bytes below which ZeroMQ's zero-copy sending is slower than a copy.
COPY_BYTES = 65536


def pack(message: Any) -> list[Buffer]:
    """Packs a message: a header, then the memory of its arrays.

    Args:
        message: any picklable object. Contiguous arrays are not copied; they must not
            change until the message has been sent.
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
    """Unpacks a message; its arrays are read-only views of the buffers."""
    return pickle.loads(parts[0], buffers=parts[1:])


def nbytes(parts: Sequence[Buffer]) -> int:
    """int, bytes of a packed message."""
    return sum(
        part.nbytes if isinstance(part, memoryview) else len(part) for part in parts
    )


def send(socket: Any, parts: Sequence[Any]) -> None:
    """Sends the parts of a message through a ZeroMQ socket."""
    import zmq

    last = len(parts) - 1
    for i, part in enumerate(parts):
        size = part.nbytes if isinstance(part, memoryview) else len(part)
        flags = zmq.SNDMORE if i < last else 0
        socket.send(part, flags, copy=size < COPY_BYTES)
