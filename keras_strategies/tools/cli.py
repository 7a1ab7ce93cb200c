"""The command line of `keras-strategies`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_strategies import __version__
from keras_strategies.errors import InvalidArgumentError, KerasStrategiesError
from keras_strategies.processes.local_cluster import LocalCluster
from keras_strategies.tools.choose_command import choose_command
from keras_strategies.tools.doctor import doctor
from keras_strategies.tools.elastic_launch import DEFAULT_RESTARTS, launch_elastic
from keras_strategies.tools.explain import explain
from keras_strategies.tools.launch_command import launch_command
from keras_strategies.tools.lead_command import lead_command
from keras_strategies.tools.top_command import top_command
from keras_strategies.tools.verify_command import STRATEGIES, verify_command

_LAUNCH = (
    "Start a Python script as a cluster of processes on this machine. The environment "
    "variable\nTF_CONFIG describes the cluster and the task of each process for "
    "MultiWorkerMirroredStrategy\nand ParameterServerStrategy. Each line of output "
    "begins with the name of its task. When a\ntask fails, all are ended, and its exit "
    "code is returned; with --elastic it is started\nagain, and training continues "
    "with the others meanwhile.\n"
)
_DOCTOR = (
    "Report what this process would train on: versions, devices, the cluster's "
    "variables,\nand whether the other tasks can be reached. Run it in all tasks at "
    "once, in place of\nthe script: each doctor answers on the port of its task:\n\n"
    "    keras-strategies launch --workers 2 -m keras_strategies doctor\n"
)
_VERIFY = (
    "Train the model of a script on one device and under a strategy, from the same "
    "weights,\nand report whether every step is equal, or what differs at first, and "
    "why. The script\ndefines a function that makes and compiles the model, and "
    "`data`. Exit code: 0 if all\nis equal, 1 if not, 2 for an error.\n\n"
    "    keras-strategies verify train.py:build --strategy mirrored --devices 2\n"
    "    keras-strategies verify train.py:train --processes 2\n\n"
    "The second form compares a training function of another framework: with "
    "--processes\nas under torchrun (DDP, FSDP2, Accelerate, Fabric), with --processes "
    "1 --devices 2\nunder keras.distribution or tf.distribute.\n"
)
_CHOOSE = (
    "Plan a step of the model of a script, and name a strategy, the command that "
    "starts the\nscript and the rows of each device. Nothing is trained. The script "
    "defines a function\nthat makes and compiles the model, and `data`, of which the "
    "shapes are used.\n\n"
    "    keras-strategies choose train.py:build --batch 512 --memory 16GiB\n"
)
_LEAD = (
    "Run the lead of the workers of MultiWorkerMirroredStrategy in this process, as in "
    "a pod of its\nown; it ends with training. Workers find it by KS_LEAD, the "
    "addresses of worker 0 and of\nthe lead:\n\n"
    "    keras-strategies lead --workers 4 --port 4712\n"
    '    KS_LEAD="worker-0:4711 lead:4712" python train.py\n'
)
_TOP = (
    "Show the workers of a run on this machine: their rows per second, the parts of "
    "their time\nin data, steps, exchanges, waits and files, and who waits for whom, "
    "with the line of the\nscript. Training is not slowed down, and a run that hangs "
    "or was killed is shown as well.\n\n"
    "    keras-strategies top\n"
    "    keras-strategies top --once --json\n"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command `keras-strategies`.

    Args:
        arguments: list of str, `sys.argv[1:]` by default.

    Returns:
        int, the exit code.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Characters that the terminal does not have must not end the launcher.
            stream.reconfigure(errors="replace")
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "launch" and options.workers is options.elastic is None:
        parser.error("the following arguments are required: --workers or --elastic")
    try:
        return _COMMANDS[options.command](options)
    except KerasStrategiesError as error:
        # That of `explain` does not lead to `explain` again.
        text = error.text if options.command == "explain" else error
        print(f"keras-strategies {options.command}: {text}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # The output was closed, as by `| head`.
        return 1
    finally:
        _flush()


def _flush() -> None:
    """Flushes output; Python would raise at its end where a pipe is closed.

    See "Note on SIGPIPE" in the documentation of Python's `signal`.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _explain(options: argparse.Namespace) -> int:
    print(explain(" ".join(options.words) or None))
    return 0


def _launch(options: argparse.Namespace) -> int:
    least, most = options.elastic or (None, options.workers)
    named = ("workers", "ps", "chief", "evaluator")
    others = [f"--{name}" for name in named if getattr(options, name)]
    if least is not None and others:
        raise InvalidArgumentError(
            "`--elastic MIN:MAX` starts MAX workers of MultiWorkerMirroredStrategy and "
            f"no other tasks. Omit {' and '.join(others)}."
        )
    cluster = LocalCluster(
        workers=most,
        ps=options.ps,
        chief=options.chief,
        evaluator=options.evaluator,
        devices_per_worker=options.devices_per_worker,
    )
    script = [options.script]
    if options.module:
        script = ["-m", *script]
    elif not Path(options.script).is_file():
        raise InvalidArgumentError(
            f"script {options.script!r} not found in {Path.cwd()}."
        )
    command = [sys.executable, "-u", *script, *options.arguments]
    restarts, grace = options.max_restarts, options.grace_seconds
    if least is None:
        return launch_command(cluster, command, restarts or 0, grace)
    restarts = DEFAULT_RESTARTS if restarts is None else restarts
    return launch_elastic(cluster, command, least, restarts, grace)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "choose": choose_command,
    "doctor": lambda options: doctor(options.timeout),
    "explain": _explain,
    "launch": _launch,
    "lead": lambda options: lead_command(options.workers, options.port),
    "top": top_command,
    "verify": verify_command,
}


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
    launch.add_argument("--workers", type=int, metavar="N", help="number of workers")
    launch.add_argument(
        "--elastic",
        type=_elastic,
        metavar="MIN:MAX",
        help="start MAX workers of MultiWorkerMirroredStrategy; training continues "
        "with MIN or more while others are started again",
    )
    launch.add_argument(
        "--ps",
        type=int,
        default=0,
        metavar="M",
        help="number of parameter servers; they end after the other tasks",
    )
    launch.add_argument(
        "--chief",
        action="store_true",
        help=(
            "add a chief; with parameter servers it coordinates, and the cluster "
            "ends with it"
        ),
    )
    launch.add_argument(
        "--evaluator",
        action="store_true",
        help=(
            "add an evaluator; after the other tasks it gets SIGTERM, and "
            "--grace-seconds for the last checkpoint"
        ),
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
        metavar="R",
        help="how often to restart the cluster after a failure, with new ports "
        "(default: 0); with --elastic, how often to restart each worker in ten minutes "
        f"(default: {DEFAULT_RESTARTS})",
    )
    launch.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds for tasks to end before they are killed (default: 10)",
    )
    launch.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module"
    )
    launch.add_argument("script", metavar="SCRIPT")
    launch.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...")

    check = commands.add_parser(
        "doctor",
        help="report what this process would train on",
        description=_DOCTOR,
        formatter_class=raw,
    )
    check.add_argument(
        "--timeout",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="seconds to wait for the other tasks (default: 10)",
    )

    entry = commands.add_parser(
        "explain",
        help="print the causes of an error and what to do",
        description="Print the causes of an error and what to do.",
    )
    entry.add_argument(
        "words",
        metavar="WORD",
        nargs="*",
        help="class of the error, such as BatchError, a message, or words of what "
        "happens, such as slow (default: list all entries)",
    )
    _add_lead(commands, raw)
    _add_verify(commands, raw)
    _add_choose(commands, raw)
    _add_top(commands, raw)
    return parser


def _add_top(commands: Any, raw: Any) -> None:
    top = commands.add_parser(
        "top",
        help="show the workers of a run on this machine, and who waits for whom",
        description=_TOP,
        formatter_class=raw,
    )
    top.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        default="",
        help="number of a process of the run, or the name that `top` shows (default: "
        "the newest run)",
    )
    top.add_argument("--once", action="store_true", help="print one report, and end")
    top.add_argument(
        "--json", action="store_true", help="print a report in a line, as JSON"
    )
    top.add_argument(
        "--seconds",
        type=_seconds,
        metavar="S",
        default=1.0,
        help="seconds between reports (default: 1)",
    )


def _add_choose(commands: Any, raw: Any) -> None:
    choose = commands.add_parser(
        "choose",
        help="name a strategy, a launcher and numbers for a script's model",
        description=_CHOOSE,
        formatter_class=raw,
    )
    choose.add_argument("target", metavar="SCRIPT:BUILD")
    choose.add_argument(
        "--batch",
        type=_count,
        metavar="N",
        required=True,
        help="rows of a global batch",
    )
    choose.add_argument(
        "--data",
        metavar="NAME",
        default="data",
        help="name of the data, or of a function that returns it (default: data)",
    )
    choose.add_argument(
        "--devices",
        type=_count,
        metavar="N",
        default=0,
        help="accelerators of each machine (default: those of this one, or 2)",
    )
    choose.add_argument(
        "--machines", type=_count, metavar="N", default=1, help="machines (default: 1)"
    )
    choose.add_argument(
        "--memory", metavar="SIZE", default="", help='of each device, such as "16 GiB"'
    )


def _add_lead(commands: Any, raw: Any) -> None:
    lead = commands.add_parser(
        "lead",
        help="run the lead of a cluster, as in a pod of its own",
        description=_LEAD,
        formatter_class=raw,
    )
    lead.add_argument(
        "--workers", type=_count, metavar="N", required=True, help="number of workers"
    )
    lead.add_argument(
        "--port", type=_count, metavar="P", required=True, help="its port"
    )


def _add_verify(commands: Any, raw: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="compare a script's training with that of one device",
        description=_VERIFY,
        formatter_class=raw,
    )
    verify.add_argument("target", metavar="SCRIPT:BUILD")
    for name, text in (
        ("data", "name of the data, or of a function that returns it (default: data)"),
        ("step", "name of a step(strategy, model, batch) of a custom loop"),
        ("save", "JSON file for the report"),
    ):
        default = "data" if name == "data" else ""
        verify.add_argument(f"--{name}", metavar="NAME", default=default, help=text)
    verify.add_argument("--strategy", choices=STRATEGIES, default="mirrored")
    for name, count, text in (
        ("devices", 0, "accelerators, or virtual CPU devices (default: 2 in all)"),
        ("processes", 0, "processes of a training function of another framework"),
        ("workers", 0, "processes of MultiWorkerMirroredStrategy (default: none)"),
        ("steps", 4, "steps to compare (default: 4)"),
    ):
        verify.add_argument(
            f"--{name}", type=_count, metavar="N", default=count, help=text
        )
    verify.add_argument(
        "--tolerance", type=_seconds, metavar="T", help="relative difference allowed"
    )


def _elastic(text: str) -> tuple[int, int]:
    least, colon, most = text.partition(":")
    if not (colon and least.isdigit() and most.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not MIN:MAX, such as 1:4")
    if not 1 <= int(least) <= int(most):
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 <= MIN <= MAX")
    return int(least), int(most)


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value
