"""Messages between the lead and the workers, and the proof of a shared secret.

A message is JSON with its length before it, in four bytes. Before the first one, both
ends prove that they know the secret: each signs the random bytes of both.

    lead    32 random bytes
    worker  32 random bytes, and the signature of both with the word "worker"
    lead    the signature of both with the word "lead"
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import struct
from collections import deque
from typing import Any

#: Bytes of the random part, of a signature, and of the worker's proof.
NONCE, SIGNATURE = 32, 32
PROOF = NONCE + SIGNATURE
#: Largest message in bytes.
LARGEST = 1 << 26
_LENGTH = struct.Struct("!I")
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode
# Bytes, at most, of a message that is kept.
_SMALL = 1 << 16


class WireError(Exception):
    """The other end sends something else than messages."""


def signature(secret: bytes, role: str, lead: bytes, worker: bytes) -> bytes:
    """The proof of one end, from the random bytes of both."""
    return hmac.digest(secret, role.encode() + lead + worker, hashlib.sha256)


def is_signed(found: bytes, expected: bytes) -> bool:
    """Whether a signature is the expected one."""
    return hmac.compare_digest(found, expected)


def encoded(kind: str, body: dict[str, Any]) -> bytes:
    """The bytes of a message.

    Raises:
        ValueError: if it is too large.
    """
    content = _encode({"kind": kind, **body}).encode()
    if len(content) > LARGEST:
        raise ValueError(
            f"a message of {len(content)} bytes; at most {LARGEST} go through the lead"
        )
    return _LENGTH.pack(len(content)) + content


def take_messages(received: bytearray) -> list[dict[str, Any]]:
    """Takes the complete messages from the received bytes.

    Their values must not be changed: several messages may share them.

    Raises:
        WireError: if the bytes are no messages.
    """
    found, start = [], 0
    while len(received) >= start + _LENGTH.size:
        (size,) = _LENGTH.unpack_from(received, start)
        if size > LARGEST:
            raise WireError(f"a message of {size} bytes")
        end = start + _LENGTH.size + size
        if len(received) < end:
            break
        parse = _parsed_again if size <= _SMALL else _parsed
        found.append(parse(bytes(received[start + _LENGTH.size : end])).copy())
        start = end
    del received[:start]
    return found


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        text = content.decode()
        message, end = _decode(text)
    except (ValueError, RecursionError) as error:
        raise WireError("no JSON") from error
    is_one = isinstance(message, dict) and end == len(text)
    if not is_one or not isinstance(message.get("kind"), str):
        raise WireError("no message")
    return message  # type: ignore[no-any-return]


# In a comparison, the messages of workers are equal.
_parsed_again = functools.lru_cache(maxsize=1)(_parsed)


class Session:
    """Messages of one end that the other end has not acknowledged.

    A session outlasts connections: what was lost with one is sent again with the next.
    Heartbeats and greetings are no part of it.
    """

    def __init__(self) -> None:
        self._sent: deque[bytes] = deque()
        self._first = 0
        #: The number of messages received.
        self.received = 0

    def add(self, message: bytes) -> None:
        """Records a message that is sent."""
        self._sent.append(message)

    def acknowledge(self, count: int) -> None:
        """Forgets the messages that the other end has received."""
        while self._first < count and self._sent:
            self._sent.popleft()
            self._first += 1

    def rest(self) -> bytes:
        """The messages to send again."""
        return b"".join(self._sent)
