"""`strategy.timeline()`: the last events of all workers, on one clock."""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from keras_strategies.communication.communicator import Communicator
from keras_strategies.timeline import recording
from keras_strategies.timeline.ring import Ring
from keras_strategies.timeline.runs import trace


class Timeline:
    """The last events of workers, 8,191 at most of each.

    Args:
        trace: dict, in Chrome's trace event format.
    """

    def __init__(self, trace: dict[str, Any]):
        self._trace = trace

    @property
    def events(self) -> list[dict[str, Any]]:
        """list of dict, in Chrome's trace event format: `ts` and `dur` are
        microseconds, `pid` is the worker, and `tid` 0 the thread that trains.
        """
        return list(self._trace["traceEvents"])

    def save(self, path: str | os.PathLike[str]) -> str:
        """Writes a file that https://ui.perfetto.dev and chrome://tracing open.

        Args:
            path: path of the file, such as `"run.json"`.

        Returns:
            str, the path.

        Raises:
            OSError: if it cannot be written.
        """
        part = Path(f"{os.fspath(path)}.part")
        part.write_text(json.dumps(self._trace))
        os.replace(part, path)
        return os.fspath(path)

    def __repr__(self) -> str:
        spans = [each for each in self._trace["traceEvents"] if each["ph"] == "X"]
        workers = len({each["pid"] for each in spans})
        return f"Timeline({len(spans)} events of {workers} workers)"


def timeline(workers: Communicator | None) -> Timeline:
    """The events of all workers.

    Args:
        workers: the workers, all of which call it; None for this process alone.
    """
    own = recording.start().ring.words.cast("B")
    packed = zlib.compress(bytes(own))
    offset = time.time_ns() - time.monotonic_ns()
    if workers is None:
        return Timeline(trace([(Ring.of(bytes(own)), offset)]))

    def exchanged() -> list[list[Any]]:
        group = workers.group
        offsets = group.gather_values("the clocks of a timeline", offset)
        found = []
        for rank, each in enumerate(offsets):
            data = packed if rank == group.index else None
            sent = workers.broadcast_bytes(f"the events of worker {rank}", data, rank)
            found.append([base64.b64encode(sent).decode(), each])
        return found

    rings = workers.actions.call("a timeline", exchanged)
    return Timeline(
        trace([(Ring.of(zlib.decompress(base64.b64decode(r))), o) for r, o in rings])
    )
