"""What carries requests to a parameter server, whichever library does it."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np


class Channel(abc.ABC):
    """Requests to one service, and the replies to them. For one thread.

    `transport.Connection` is the one over ZeroMQ, `ray_channel.RayChannel` the one over
    Ray's actors. A request may arrive twice, when the service died in between: updates
    have names, so that each is made once.
    """

    #: str, what the service is to people, such as `"parameter server 0"`.
    peer: str
    #: int, bytes so far.
    sent_bytes: int
    received_bytes: int

    @abc.abstractmethod
    def begin(self, message: Any, takes_turns: bool = False) -> int:
        """Sends a request without waiting; the number to ask for its reply with.

        Args:
            message: anything that pickle takes.
            takes_turns: bool, whether what this reply brings will have been read when
                the request after the next one is sent, so that its memory may be
                written to then.
        """

    @abc.abstractmethod
    def finish(self, number: int, timeout: float) -> Any:
        """The reply to a request.

        Args:
            number: int, as `begin` returned it.
            timeout: float, seconds.

        Raises:
            RuntimeError: `ClusterTimeoutError` if there is none in time, `PeerError`
                with what went wrong at the service.
        """

    def request(self, message: Any, timeout: float) -> Any:
        """Sends a request and waits for its reply (see `finish`)."""
        return self.finish(self.begin(message), timeout)

    def is_lent(self, array: np.ndarray) -> bool:
        """Whether an array lies in memory that later replies are written to."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the connection."""
