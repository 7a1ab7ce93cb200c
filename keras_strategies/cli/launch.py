"""`keras-strategies launch`: a script as a cluster of processes on this machine."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from keras_strategies.cli.processes import Ended, Task, run_together
from keras_strategies.cluster import tf_config
from keras_strategies.cluster.environment import DEVICES_PER_WORKER
from keras_strategies.cluster.local import free_addresses
from keras_strategies.errors import ClusterError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers", type=int, required=True, metavar="N", help="worker processes"
    )
    parser.add_argument(
        "--ps", type=int, default=0, metavar="M", help="parameter servers"
    )
    parser.add_argument(
        "--chief", action="store_true", help="a chief beside the workers"
    )
    parser.add_argument(
        "--evaluator", action="store_true", help="an evaluator beside the cluster"
    )
    parser.add_argument(
        "--devices-per-worker",
        type=int,
        metavar="K",
        help="virtual CPU devices of each process, where there are no accelerators",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="R",
        help="start the cluster again so many times when a task has failed",
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit code."""
    for name in ("workers", "ps", "max_restarts"):
        if getattr(options, name) < (1 if name == "workers" else 0):
            raise ClusterError(
                f"--{name.replace('_', '-')} is {getattr(options, name)}; it is "
                f"{'1 or more' if name == 'workers' else '0 or more'}."
            )
    # So that `finally` ends the processes then, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    command = [sys.executable, "-u", options.script, *options.arguments]
    for attempt in range(options.max_restarts + 1):
        ended = run_together(cluster_tasks(options, command))
        if not ended.code:
            return 0
        _say(ended, attempt, options.max_restarts)
    return ended.code


def cluster_tasks(options: argparse.Namespace, command: Sequence[str]) -> list[Task]:
    """A task for each process of a cluster at free addresses."""
    counts = {
        "chief": int(options.chief),
        "worker": options.workers,
        "ps": options.ps,
    }
    addresses = iter(free_addresses(sum(counts.values())))
    cluster = {
        job: [next(addresses) for _ in range(count)]
        for job, count in counts.items()
        if count
    }
    jobs = [(job, i) for job, tasks in cluster.items() for i in range(len(tasks))]
    if options.evaluator:
        # TensorFlow does not count it among the cluster's tasks.
        (address,) = free_addresses(1)
        cluster["evaluator"] = [address]
        jobs.append(("evaluator", 0))
    environment = dict(os.environ)
    if options.devices_per_worker is not None:
        environment[DEVICES_PER_WORKER] = str(options.devices_per_worker)
    return [
        Task(
            f"{job} {index}",
            command,
            {**environment, tf_config.VARIABLE: _tf_config(cluster, job, index)},
            runs_forever=job == "ps",
        )
        for job, index in jobs
    ]


def _tf_config(cluster: dict[str, Any], job: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def _say(ended: Ended, attempt: int, restarts: int) -> None:
    how = f"exit code {ended.code}"
    if ended.code > 128:
        how = f"signal {ended.code - 128}"
    then = "all tasks were ended"
    if attempt < restarts:
        then += f"; starting again ({attempt + 1} of {restarts})"
    print(f"keras-strategies: {ended.task} ended with {how}; {then}.", file=sys.stderr)
