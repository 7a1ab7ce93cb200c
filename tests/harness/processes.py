"""Scripts that write their process numbers, and waiting for processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

# A process imports a framework for ten seconds of a core, which others share.
TIMEOUT = 120.0

# What test scripts begin with. `begun(n)` waits until n tasks have begun.
_PRELUDE = """\
import json, os, pathlib, signal, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
me = config["task"]["type"] + str(config["task"]["index"])
here = pathlib.Path({folder!r})
def write(name, text):
    (here / (name + ".part")).write_text(text)
    (here / (name + ".part")).rename(here / name)
def begun(count):
    while len(list(here.glob("*.pid"))) < count:
        time.sleep(0.01)
write(me + ".pid", str(os.getpid()))
"""


def write_script(folder: Path, body: str) -> str:
    """Writes a script that leaves `worker0.pid` and so on in its folder."""
    path = folder / "script.py"
    path.write_text(_PRELUDE.format(folder=str(folder)) + body)
    return str(path)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "keras_strategies", *arguments]


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `keras-strategies launch` to its end."""
    return subprocess.run(
        command("launch", *arguments),
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def output_of(
    command: Sequence[str], folder: Path | None = None, timeout: float = 300.0
) -> str:
    """What a command prints, which has to end with exit code 0.

    Args:
        command: the program and its arguments.
        folder: where it runs; None for the folder of the tests.
        timeout: seconds that it may take.
    """
    process = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert process.returncode == 0, process.stderr + process.stdout
    return process.stdout


def wait_until(holds: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < until, f"waited in vain until {what}"
        time.sleep(0.02)


def pids(folder: Path, count: int) -> list[int]:
    """The processes that have said where they are, when there are so many."""
    wait_until(
        lambda: len(list(folder.glob("*.pid"))) == count, f"{count} tasks have begun"
    )
    return [int(path.read_text()) for path in folder.glob("*.pid")]


def runs(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(numbers: list[int]) -> None:
    wait_until(lambda: not any(map(runs, numbers)), f"{numbers} have ended")


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
