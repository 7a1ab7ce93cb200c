"""`keras-strategies launch`: a script as a cluster on this machine."""

from __future__ import annotations

import dataclasses
import os
import queue
import signal
from collections.abc import Sequence

from keras_strategies.processes.launched_lead import launched_lead
from keras_strategies.processes.launcher import (
    Ended,
    Events,
    ProcessLauncher,
    Signalled,
    signals_as_events,
)
from keras_strategies.processes.local_cluster import LocalCluster
from keras_strategies.tools.tracebacks import print_line, print_tracebacks


def launch_command(
    cluster: LocalCluster,
    command: Sequence[str],
    max_restarts: int = 0,
    grace_seconds: float = 10.0,
) -> int:
    """Runs a command as every task of a cluster, until the cluster has ended.

    The cluster has ended when all of `LocalCluster.decisive` have. When a task fails,
    the others are ended, and the cluster is started again, with other ports, up to
    `max_restarts` times.

    Args:
        cluster: the tasks.
        command: list of str, the program and its arguments.
        max_restarts: int, number of restarts after failures.
        grace_seconds: float, seconds that tasks get to end before they are killed.

    Returns:
        int, the exit code of the task that failed first in the last attempt, or 0;
        128 + n after signal n.
    """
    events: Events = queue.SimpleQueue()
    with signals_as_events(events):
        restarts = 0
        while True:
            last = _run(cluster, command, events, grace_seconds)
            if last is None:
                return 0
            if isinstance(last, Signalled):
                return 128 + last.number
            if restarts == max_restarts:
                return last.exit_code
            restarts += 1
            print_line(f"restarting ({restarts} of {max_restarts}) with new ports.")


def _run(
    cluster: LocalCluster, command: Sequence[str], events: Events, grace_seconds: float
) -> Ended | Signalled | None:
    """Runs the cluster once; returns its failure or a signal, None on success."""
    failed = None
    with (
        launched_lead(cluster.environments(os.environ)) as environments,
        ProcessLauncher(events, grace_seconds, holds_tracebacks=True) as processes,
    ):
        for task, environment in environments.items():
            processes.start(task, command, environment)
        waiting = set(cluster.decisive)
        while waiting and failed is None:
            event = processes.next_event()
            if isinstance(event, Signalled):
                print_line(f"{signal.Signals(event.number).name}: ending all tasks.")
                processes.end(event.number)
                break
            if isinstance(event, Ended):
                waiting.discard(event.task)
                if event.code:
                    failed = _first_failure(processes, event)
    print_tracebacks(processes.ended, failed)
    # A signal while the others are ended also prevents a restart.
    return processes.signalled or failed


def _first_failure(processes: ProcessLauncher, ended: Ended) -> Ended:
    """The failure that has caused that of a task, or this one; prints both."""
    first = processes.first_failure(ended)
    if first is ended or first.code:
        print_line(f"{first}; ending the others.{first.events}")
        return first
    # It has exited with 0 in the middle of training, as by `sys.exit()`.
    print_line(f"{first} before the others, and {ended}; ending the others.")
    return dataclasses.replace(first, code=ended.code)
