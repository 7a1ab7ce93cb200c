"""Filter for lines that engines print at every start."""

from __future__ import annotations

import re
from collections.abc import Mapping

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


def is_engine_line(line: str) -> bool:
    """Whether an engine prints this line in every program."""
    return _LINES.match(line) is not None


def are_wanted(environment: Mapping[str, str]) -> bool:
    """Whether the user has requested all output of TensorFlow's engine."""
    return environment.get("TF_CPP_MIN_LOG_LEVEL", "") == "0"
