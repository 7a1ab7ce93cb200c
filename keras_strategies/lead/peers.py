"""Connections to the lead: of peers without a proof at first, then of workers.

Before a peer has proved the secret, it costs one of `PENDING` places for
`PROOF_SECONDS`, a buffer of `_FIRST_BYTES`, and no thread.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any, Protocol

from keras_strategies.lead.wire import (
    NONCE,
    PROOF,
    WireError,
    is_signed,
    signature,
    take_messages,
)

#: Peers without a proof at a time, and the seconds that they have for it; fewer if all
#: places are taken.
PENDING, PROOF_SECONDS, SHORT_SECONDS = 64, 5.0, 0.5
# Bytes of one read, before and after the proof.
_FIRST_BYTES, _MORE_BYTES = 4096, 1 << 18
# Bytes that wait for a worker before its connection is given up.
_UNSENT = 1 << 27
_INTERVAL = 60.0
# For all connections: what was read is taken from it at once.
_SHARED = bytearray(_MORE_BYTES)


class RareWarnings:
    """Warnings about peers without a proof, one a minute.

    Args:
        show: called with each line.
    """

    def __init__(self, show: Callable[[str], None]):
        self._show = show
        self._next, self._left_out = 0.0, 0

    def warn(self, text: str) -> None:
        """Logs a line, or counts it."""
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last line)" if self._left_out else ""
        self._show(f"The lead: {text}{more}")
        self._next, self._left_out = now + _INTERVAL, 0


class Host(Protocol):
    """What a connection needs of the server."""

    secret: bytes
    warnings: RareWarnings

    def proved(self, peer: LeadPeer) -> None:
        """A peer has proved the secret."""

    def received(self, peer: LeadPeer, message: dict[str, Any]) -> None:
        """A message of a worker."""

    def ended(self, peer: LeadPeer) -> None:
        """A connection has ended."""


class LeadPeer(asyncio.BufferedProtocol):
    """A connection.

    Args:
        server: `Host`.
    """

    def __init__(self, server: Host):
        self._server = server
        self._buffer = bytearray(_FIRST_BYTES)
        self._received = bytearray()
        self._nonce = secrets.token_bytes(NONCE)
        self._transport: Any = None
        self.host = ""
        self.since = time.monotonic()
        self.is_proved = False
        #: The process of the worker, after its `hello`.
        self.uid: str | None = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.host = str(transport.get_extra_info("peername")[0])
        transport.write(self._nonce)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.ended(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, count: int) -> None:
        self._received += memoryview(self._buffer)[:count]
        try:
            if self.is_proved or self._check_proof():
                for message in take_messages(self._received):
                    self._server.received(self, message)
        except (WireError, TypeError, ValueError, LookupError) as error:
            self._server.warnings.warn(f"{self.host} sends no messages: {error!r:.99}")
            self.abort()

    def _check_proof(self) -> bool:
        """Whether the peer has proved the secret."""
        if len(self._received) < PROOF:
            return False
        nonce = bytes(self._received[:NONCE])
        proof = bytes(self._received[NONCE:PROOF])
        secret = self._server.secret
        if not is_signed(proof, signature(secret, "worker", self._nonce, nonce)):
            raise WireError("without the secret of this cluster")
        del self._received[:PROOF]
        self.is_proved = True
        self._buffer = _SHARED
        self._server.proved(self)
        self._transport.write(signature(secret, "lead", self._nonce, nonce))
        return True

    @property
    def socket(self) -> Any:
        """The socket of the connection."""
        return self._transport.get_extra_info("socket")

    def send(self, message: bytes) -> None:
        """Sends a message; a worker that does not read is given up."""
        if self._transport.is_closing():
            # Writing would be logged.
            return
        self._transport.write(message)
        if self._transport.get_write_buffer_size() > _UNSENT:
            self.abort()

    def close(self) -> None:
        """Closes the connection after the messages sent."""
        self._transport.close()

    def abort(self) -> None:
        """Closes the connection at once."""
        self._transport.abort()
