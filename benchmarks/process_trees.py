"""Contestants that are processes: their start, and what they used up to a moment.

A script calls `arrive` when it has done its work, and waits there until the processes
of its contestant have been measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

#: The folder where processes say that they have arrived.
FOLDER = "KS_BENCHMARK_FOLDER"
_TICK = 0.005
# Seconds in which processes that have been measured may end.
_END = 30.0


@dataclass(frozen=True)
class Command:
    """A process of a contestant.

    Args:
        arguments: the arguments of Python.
        environment: dict, besides the environment of this process.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Used:
    """What the processes of a contestant used until all of them had arrived.

    Args:
        wall, cpu: float, seconds; those of the CPU are of all processes.
        peaks, shares: list of int, bytes of each process: the most that was in memory
            (`VmHWM`), and at the end its share (`Pss`), in which a page that n
            processes have in common counts as 1/n.
        facts: what each process passed to `arrive`.
    """

    wall: float
    cpu: float
    peaks: list[int]
    shares: list[int]
    facts: list[Any]


def arrive(facts: Any = None) -> None:
    """Reports that this process has done its work; returns when it is measured."""
    folder = Path(os.environ[FOLDER])
    part = folder / f"{os.getpid()}.part"
    part.write_text(json.dumps(facts))
    part.rename(folder / f"{os.getpid()}.arrived")
    while not (folder / "measured").exists():
        time.sleep(_TICK)


def used(
    commands: Sequence[Command],
    arrivals: int = 1,
    timeout: float = 240.0,
    is_counted: Callable[[psutil.Process], bool] = lambda process: True,
) -> Used:
    """Runs the processes of a contestant, at most once each, and measures them.

    Args:
        commands: the processes that are started here.
        arrivals: int, number of processes that call `arrive`.
        timeout: float, seconds that they may take.
        is_counted: whether a process that exists at the end is one of interest.

    Raises:
        RuntimeError: with the output, if one of them fails or takes too long.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = stack.enter_context((folder / "log").open("wb"))
        start = time.perf_counter()
        processes = [
            subprocess.Popen(
                [sys.executable, *command.arguments],
                env={**os.environ, **command.environment, FOLDER: str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for command in commands
        ]
        for process in processes:
            stack.callback(_end, process)
        until = start + timeout
        while len(arrived := list(folder.glob("*.arrived"))) < arrivals:
            failed = any(process.poll() is not None for process in processes)
            if failed or time.perf_counter() > until:
                why = "ended before" if failed else f"took {timeout:g} s for"
                text = (folder / "log").read_text(errors="replace")
                raise RuntimeError(f"A process {why} its work:\n{text[-4000:]}")
            time.sleep(_TICK)
        wall = time.perf_counter() - start
        found = _measured(processes, is_counted)
        facts = [json.loads(file.read_text()) for file in arrived]
        (folder / "measured").touch()
        return Used(wall, *found, facts)


def _measured(
    processes: Sequence[subprocess.Popen[bytes]],
    is_counted: Callable[[psutil.Process], bool],
) -> tuple[float, list[int], list[int]]:
    """CPU seconds, and bytes of each process, of these and their descendants."""
    cpu, peaks, shares = 0.0, [], []
    for root in processes:
        parent = psutil.Process(root.pid)
        for each in (parent, *parent.children(recursive=True)):
            times = each.cpu_times()
            # Of those that have ended, the parent has the times.
            cpu += times.user + times.system
            cpu += times.children_user + times.children_system
            if is_counted(each):
                peaks.append(_kilobytes(each.pid, "status", "VmHWM") * 1024)
                shares.append(_kilobytes(each.pid, "smaps_rollup", "Pss") * 1024)
    return cpu, peaks, shares


def _kilobytes(pid: int, file: str, name: str) -> int:
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0])
    return 0


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a process that was measured, or else kills it."""
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
    try:
        process.wait(timeout=_END)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    # In sessions of their own, such as the tasks of a launcher.
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
