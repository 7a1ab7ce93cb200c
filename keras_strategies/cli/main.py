"""`keras-strategies` and `python -m keras_strategies`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from keras_strategies.cli import doctor, launch
from keras_strategies.errors import KerasStrategiesError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line.

    Args:
        arguments: list of str; None for this process's.

    Returns:
        int, the exit code.
    """
    parser = argparse.ArgumentParser(prog="keras-strategies")
    commands = parser.add_subparsers(dest="command", required=True)
    launcher = commands.add_parser(
        "launch", help="run a script as a cluster of processes on this machine"
    )
    launch.add_arguments(launcher)
    commands.add_parser("doctor", help="what this machine has, and what is set on it")
    options = parser.parse_args(arguments)
    try:
        if options.command == "launch":
            return launch.main(options)
        return doctor.main()
    except KerasStrategiesError as error:
        print(f"keras-strategies: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
