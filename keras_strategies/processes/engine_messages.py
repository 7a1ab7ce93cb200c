"""Filter for lines that engines print at every start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TextIO

# No engine has a switch for these: TensorFlow 2.21 writes the first two while it is
# imported, at every TF_CPP_MIN_LOG_LEVEL; jaxlib 0.10 writes the others.
_LINES = re.compile(
    # WARNING: All log messages before absl::InitializeLog() is called are written ...
    r"WARNING: All log messages before absl::InitializeLog\(\) is called "
    # I0000 00:00:1795360289.288 23852 port.cc:153] oneDNN custom operations are on.
    r"|I\d{4} .* port\.cc:\d+\] oneDNN custom operations are on\. "
    # [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ...
    r"|\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. "
    # W1122 15:17:01.095542   25334 coordination_service.cc:185] [1557] Using ...
    r"|W\d{4} .* coordination_service\.cc:\d+\] .*Using experimental recoverable task "
)
# (_Host pid=29125) in colours: Ray's name of the process.
_LABEL = re.compile(r"(\x1b\[\d+m)?\(\w+ pid=\d+\)(\x1b\[0m)? ")


def is_engine_line(line: str) -> bool:
    """Whether an engine prints this line in every program."""
    label = _LABEL.match(line)
    return _LINES.match(line, label.end() if label else 0) is not None


def are_wanted(environment: Mapping[str, str]) -> bool:
    """Whether the user has requested all output of TensorFlow's engine."""
    return environment.get("TF_CPP_MIN_LOG_LEVEL", "") == "0"


class WithoutEngineLines:
    """A text stream that leaves out the lines of engines.

    Args:
        stream: where all other lines are written, each when it is complete.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._line = ""

    def write(self, text: str) -> int:
        *complete, self._line = (self._line + text).split("\n")
        for line in complete:
            if not is_engine_line(line):
                self._stream.write(f"{line}\n")
        return len(text)

    def flush(self) -> None:
        """Flushes the complete lines; a part may be the beginning of an engine's."""
        self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)
