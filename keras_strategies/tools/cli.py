"""The command line of `keras-strategies`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_strategies import __version__
from keras_strategies.errors import KerasStrategiesError
from keras_strategies.processes.local_cluster import LocalCluster
from keras_strategies.tools.doctor import doctor
from keras_strategies.tools.launch_command import launch_command

_LAUNCH = """\
Start a Python script as a cluster of processes on this machine. Each finds its place
in the variable TF_CONFIG, where MultiWorkerMirroredStrategy and
ParameterServerStrategy look for it. Each line of output has the name of its task in
front. When a task fails, all are ended, and its exit code is returned.
"""
_DOCTOR = """\
Say what this process would train on: versions, devices, what the cluster's variables
say, whether the other tasks can be reached, and how long workers take to sum values.
Run on all machines at once, as the script would be, it answers itself on the ports of
the cluster:

    keras-strategies launch --workers 2 -m keras_strategies doctor
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command `keras-strategies`.

    Args:
        arguments: list of str, `sys.argv[1:]` by default.

    Returns:
        int, the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a task prints should not end the launcher on a terminal that
            # cannot show it.
            stream.reconfigure(errors="replace")
    options = _parser().parse_args(arguments)
    try:
        if options.command == "doctor":
            return doctor(timeout_seconds=options.timeout)
        return _launch(options)
    except KerasStrategiesError as error:
        print(f"keras-strategies {options.command}: {error}", file=sys.stderr)
        return 2
    finally:
        _flush()


def _flush() -> None:
    """Writes what is left; after `| head`, nobody reads it, and Python would complain.

    See "Note on SIGPIPE" in the documentation of Python's `signal`.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _launch(options: argparse.Namespace) -> int:
    cluster = LocalCluster(
        workers=options.workers,
        ps=options.ps,
        chief=options.chief,
        evaluator=options.evaluator,
        devices_per_worker=options.devices_per_worker,
    )
    script = [options.script]
    if options.module:
        script = ["-m", *script]
    elif not Path(options.script).is_file():
        print(
            f"keras-strategies launch: there is no script {options.script!r} in "
            f"{Path.cwd()}.",
            file=sys.stderr,
        )
        return 2
    return launch_command(
        cluster,
        [sys.executable, "-u", *script, *options.arguments],
        max_restarts=options.max_restarts,
        grace_seconds=options.grace_seconds,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-strategies",
        description="Distribution strategies for Keras 3, from the command line.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    raw = argparse.RawDescriptionHelpFormatter

    launch = commands.add_parser(
        "launch",
        help="start a script as a cluster on this machine",
        description=_LAUNCH,
        formatter_class=raw,
    )
    launch.add_argument(
        "--workers", type=int, required=True, metavar="N", help="number of workers"
    )
    launch.add_argument(
        "--ps",
        type=int,
        default=0,
        metavar="M",
        help="number of parameter servers; they are ended when the others are done",
    )
    launch.add_argument(
        "--chief",
        action="store_true",
        help="a chief beside the workers; with parameter servers it coordinates, and "
        "its end is the end of all",
    )
    launch.add_argument(
        "--evaluator",
        action="store_true",
        help="an evaluator beside the cluster; when the others are done it gets "
        "SIGTERM, and --grace-seconds for the last checkpoint",
    )
    launch.add_argument(
        "--devices-per-worker",
        type=int,
        metavar="K",
        help="GPUs for each worker, or virtual CPU devices where there are no GPUs "
        "(default: share the GPUs equally)",
    )
    launch.add_argument(
        "--max-restarts",
        type=_count,
        default=0,
        metavar="R",
        help="how often to start all again after a failure, with other ports",
    )
    launch.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="how long tasks may take to end before they are killed (default: 10)",
    )
    launch.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module"
    )
    launch.add_argument("script", metavar="SCRIPT")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")

    check = commands.add_parser(
        "doctor",
        help="say what this process would train on",
        description=_DOCTOR,
        formatter_class=raw,
    )
    check.add_argument(
        "--timeout",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="how long to wait for the other tasks (default: 10)",
    )
    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of seconds")
    return value
