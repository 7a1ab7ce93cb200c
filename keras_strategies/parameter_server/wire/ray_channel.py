"""Steps that travel as calls of Ray's actors, instead of over `transport`.

It is there to be chosen, to be compared with, and for networks on which Ray is the only
way that is open. Arrays go through Ray's object store, a copy on each side, and each
call passes several processes; `benchmarks/parameter_server.py` says what that costs.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from keras_strategies.errors import ClusterTimeoutError, PeerError
from keras_strategies.parameter_server.wire.array_messages import nbytes, pack
from keras_strategies.parameter_server.wire.channel import Channel

#: Seconds until a server that is not there is looked for again.
_AGAIN_SECONDS = 0.1
#: The answer of a server that Ray has and that has not got as far as to serve.
STARTING = "starting"
#: Bytes of Ray's object store, which the steps under way have to fit into.
STORE_BYTES = 1 << 30


def actor_name(index: int, incarnation: int) -> str:
    """What Ray calls a parameter server; one that is started anew has a new name."""
    return f"ps-{index}.{incarnation}"


class RayChannel(Channel):
    """Sends requests to a parameter server's actor. For one thread of a Ray process.

    Args:
        index: int, the number of the server.
    """

    def __init__(self, index: int):
        self._prefix = actor_name(index, 0)[:-1]
        self.peer = f"parameter server {index}"
        self._numbers = itertools.count(1)
        # What has not been answered: the message, and Ray's reference to its reply.
        self._waiting: dict[int, tuple[Any, Any]] = {}
        self._actor: Any = None
        self.received_bytes = 0
        self.sent_bytes = 0

    def begin(self, message: Any, takes_turns: bool = False) -> int:
        number = next(self._numbers)
        self.sent_bytes += nbytes(pack(message))
        self._waiting[number] = (message, self._call(message))
        return number

    def _call(self, message: Any) -> Any:
        """Sends a message; None where there is no such server at the moment."""
        import ray

        try:
            if self._actor is None:
                self._actor = self._find()
            return self._actor.request.remote(message)
        except (ValueError, ray.exceptions.RayActorError):
            self._actor = None
            return None

    def _find(self) -> Any:
        """The server's last process; `ValueError` if there is none."""
        import ray

        cut = len(self._prefix)
        names = [n for n in ray.util.list_named_actors() if n.startswith(self._prefix)]
        return ray.get_actor(max(names, key=lambda name: int(name[cut:])))

    def finish(self, number: int, timeout: float) -> Any:
        import ray

        until = time.monotonic() + timeout
        message, reference = self._waiting.pop(number)
        while True:
            left = max(0.0, until - time.monotonic())
            try:
                if reference is not None:
                    status, value = ray.get(reference, timeout=left)
                    if status != STARTING:
                        break
            except ray.exceptions.GetTimeoutError:
                pass
            except ray.exceptions.RayActorError:
                # It died. Updates have names, so that none is made twice.
                self._actor = None
            if time.monotonic() >= until:
                raise ClusterTimeoutError(
                    f"{self.peer} did not answer within {timeout:g} seconds. It may "
                    "have died, be stopped, or be too busy; `timeout_seconds` of the "
                    "strategy changes the wait."
                )
            time.sleep(_AGAIN_SECONDS)
            reference = self._call(message)
        if status == "error":
            raise value if isinstance(value, Exception) else PeerError(str(value))
        self.received_bytes += nbytes(pack(value))
        return value

    def close(self) -> None:
        self._waiting.clear()
        self._actor = None


class Handler:
    """The other end: what a server's actor calls for each request.

    Requests come on a thread of Ray's, and the server's own service goes on beside it,
    for the coordinator; `run` is what both share.
    """

    def __init__(self) -> None:
        self._run: Callable[[Any], tuple[str, Any]] | None = None

    def serve(self, run: Callable[[Any], tuple[str, Any]]) -> None:
        """Begins to answer requests.

        Args:
            run: callable of a message that returns `("ok", reply)` or
                `("error", exception)`, from any thread.
        """
        self._run = run

    def __call__(self, message: Any) -> tuple[str, Any]:
        if self._run is None:
            return STARTING, None
        return self._run(message)


#: The handler of this process.
HANDLER = Handler()
