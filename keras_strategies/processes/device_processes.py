"""Processes that run the script of this one again, one for each other device."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import sys
import sysconfig
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_strategies.cluster.environment import DEVICE_PROCESS, QUIET, RANK_VARIABLES
from keras_strategies.cluster.resolvers.local_processes import free_addresses
from keras_strategies.processes.keras_import import own_backend
from keras_strategies.processes.launcher import Ended, Events, ProcessLauncher
from keras_strategies.processes.local_cluster import THREADS, LocalTask, core_count

# Seconds for the other processes to reach the end of the script, and then to end by
# SIGTERM.
_END_SECONDS = 30.0
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Program:
    """The script that this process runs.

    Args:
        command: tuple of str, the command that runs it again.
        is_installed: bool, whether it is a command of an installed package, such as
            `pytest` or a worker of Ray, and not a script of the user's.
    """

    command: tuple[str, ...]
    is_installed: bool

    @classmethod
    def find(cls) -> Program | None:
        """The script of this process.

        Returns:
            A `Program`; None in a notebook, at a prompt, for code that is not in a file
            of the command line, in a process of `multiprocessing`, and in a thread.
        """
        main = sys.modules["__main__"]
        file = getattr(main, "__file__", None)
        is_first = threading.current_thread() is threading.main_thread()
        if file is None or not is_first or _is_interactive():
            return None
        if multiprocessing.parent_process() is not None or not os.path.isfile(file):
            return None
        path = os.path.abspath(file)
        arguments = list(sys.orig_argv[1:])
        if getattr(main, "__spec__", None) is None:
            names = [os.path.basename(argument) for argument in arguments]
            if os.path.basename(path) not in names:
                return None  # A program runs the file, as `runpy` does.
            # The working directory may have changed.
            arguments[names.index(os.path.basename(path))] = path
        elif "-m" not in arguments:
            return None
        return cls((sys.executable, *arguments), _is_installed(path))


def _is_interactive() -> bool:
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return True
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _is_installed(path: str) -> bool:
    names = ("stdlib", "platstdlib", "purelib", "platlib", "scripts")
    folders = {os.path.realpath(sysconfig.get_path(name)) for name in names}
    own = Path(os.path.realpath(os.path.dirname(path)))
    return any(own.is_relative_to(folder) for folder in folders)


@dataclass(frozen=True)
class DeviceProcess:
    """This process among those of the devices.

    Args:
        addresses: tuple of str, the address of each process; the first is that of the
            process that has started the others.
        index: int, the number of this process.
        made_before: int, strategies of the script that the first process had made for
            itself alone before it started the others.
    """

    addresses: tuple[str, ...]
    index: int
    made_before: int


_own: DeviceProcess | None = None
_others: _Others | None = None


def own_process() -> DeviceProcess | None:
    """This process among those of the devices; None if there are no others."""
    global _own
    # Removed, so that programs that this one starts do not find it.
    given = os.environ.pop(DEVICE_PROCESS, None)
    if given is not None:
        found = json.loads(given)
        addresses = tuple(found["addresses"])
        _own = DeviceProcess(addresses, found["index"], found["made_before"])
    return _own


def start_others(program: Program, count: int, made_before: int = 0) -> DeviceProcess:
    """Starts the script of this process again, for the other devices.

    Lines that the other processes print to stderr have the prefix `[worker 1]`; what
    they print to stdout is left out, since it is what this process prints.

    Args:
        program: the script.
        count: int, the number of processes, including this one.
        made_before: int, see `DeviceProcess`.

    Returns:
        This process, the first one.
    """
    global _own, _others
    addresses = free_addresses(count)
    _others = _Others()
    threads = str(max(1, core_count() // count))
    outer = {k: text for k, text in os.environ.items() if k not in RANK_VARIABLES}
    for index in range(1, count):
        own = json.dumps(
            {"addresses": addresses, "index": index, "made_before": made_before}
        )
        environment = {
            THREADS: threads,
            **QUIET,
            **outer,
            **own_backend(),
            DEVICE_PROCESS: own,
        }
        _others.start(index, program.command, environment)
    _own = DeviceProcess(tuple(addresses), 0, made_before)
    return _own


def missing_process() -> str | None:
    """Which of the other processes has ended, and how; None if all of them run."""
    return None if _others is None else _others.first_ended()


def end_others() -> None:
    """Waits for the other processes, which end with the script, and ends the rest."""
    global _others
    if _others is not None:
        others, _others = _others, None
        others.end()


class _Others:
    """The other processes."""

    def __init__(self) -> None:
        self._events: Events = queue.SimpleQueue()
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(open(os.devnull, "w"))
            launcher = ProcessLauncher(self._events, _GRACE_SECONDS, out=output)
            self._launcher = stack.enter_context(launcher)
            self._stack = stack.pop_all()
        self._running: set[LocalTask] = set()
        self._ended: list[Ended] = []

    def start(
        self, index: int, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        task = LocalTask("worker", index)
        self._running.add(task)
        self._launcher.start(task, command, environment)

    def first_ended(self) -> str | None:
        self._follow(0.0)
        if not self._ended:
            return None
        event = self._ended[0]
        return (
            f"The process of {event.task}, which runs this script for another device, "
            f"{event.how} before it made the strategy. {event.last_error}".rstrip()
        )

    def _follow(self, seconds: float) -> bool:
        event = self._launcher.next_event(seconds)
        if isinstance(event, Ended):
            self._running.discard(event.task)
            self._ended.append(event)
        return event is not None

    def end(self) -> None:
        while self._running and self._follow(_END_SECONDS):
            pass
        self._stack.close()
        for event in self._ended:
            if event.code:
                print(f"keras_strategies: {event}", file=sys.stderr, flush=True)
