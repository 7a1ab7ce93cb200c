"""Processes of an elastic group that tests without `fit`: settings, files and end.

A worker runs as `python SCRIPT SETTINGS INDEX`, until a file `stop` exists.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_strategies.cluster.group.membership import Membership
from keras_strategies.lead.state import Settings


class Workers:
    """The workers, as the test sees them.

    Args:
        folder: for files.
        given: `Settings` of the group.
        settings: further settings of the workers.
    """

    def __init__(self, folder: Path, given: Settings, **settings: Any):
        self.folder = folder
        self.processes: dict[int, Any] = {}
        settings |= {"folder": str(folder), "group": dataclasses.asdict(given)}
        self.settings = settings
        (folder / "settings").write_text(json.dumps(settings))

    def arguments(self, index: int) -> tuple[str, str]:
        return str(self.folder / "settings"), str(index)

    def members(self, index: int) -> list[int]:
        """The members of the generation of a worker, when it has trained in it."""
        path = self.folder / f"{self.processes[index].pid}.members"
        return list(json.loads(path.read_text())) if path.exists() else []

    def train_together(self, members: set[int]) -> bool:
        """Whether these workers are in one generation, without others."""
        return all(set(self.members(index)) == members for index in members)

    def stop(self) -> None:
        """Ends the training of all workers, at the same step."""
        (self.folder / "stop").touch()

    def result(self, index: int) -> dict[str, Any]:
        """What a worker that has ended has written."""
        path = self.folder / f"{self.processes[index].pid}.json"
        found: dict[str, Any] = json.loads(path.read_text())
        return found


# In the process of a worker.


def join(settings: dict[str, Any], index: int, is_ready: bool = True) -> Membership:
    """Joins the group; `is_ready` as in `Membership`."""
    group = Settings(**settings["group"])
    return Membership(group, index, is_ready=is_ready)


def write_members(folder: Path, membership: Membership) -> None:
    """Writes the members of the current generation."""
    members = list(membership.generation.members)
    write(folder, "members", members)


def write(folder: Path, kind: str, value: Any) -> None:
    """Writes `PID.kind` in one step."""
    path = folder / f"{os.getpid()}.{kind}"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.rename(path)


def run(train: Callable[[dict[str, Any], int], Membership]) -> None:
    """Runs `train(settings, index)`, and leaves the group after all have ended."""
    membership = train(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]))
    # Workers that leave are no losses.
    membership.group.barrier("the end")
    membership.leave()


def lead_process(address: str) -> int:
    """The number of the process that leads the workers of an address."""
    found = (each for each in Path("/proc").iterdir() if each.name.isdigit())
    return next(int(each.name) for each in found if _is_lead(each, address))


def _is_lead(process: Path, address: str) -> bool:
    try:
        command = (process / "cmdline").read_text()
    except OSError:
        return False
    return "lead.process" in command and address in command
