"""Runs the scripts against what is installed, and prints a table.

    python -m museum                      # all
    python -m museum ddp_uneven_rows      # by name
    python -m museum --framework torch    # by framework, package or backend
    python -m museum --write              # the results and docs/silent-bugs.md, too

A process for each backend imports it once and forks a process for each script.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import traceback
from typing import Any

from museum.common import FRAMEWORKS
from museum.page import FOLDER, RESULTS, scripts, write_page

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
#: Seconds for a script.
TIMEOUT = 300


def chosen(names: list[str], framework: str | None) -> list[str]:
    """Names of the scripts that the arguments select."""
    every = scripts()
    unknown = sorted(set(names) - set(every))
    if unknown:
        raise SystemExit(f"No script {unknown}; there are: {', '.join(every)}.")
    if framework is None:
        return names or list(every)
    found = []
    for name, about in every.items():
        words = (about["Framework"], *FRAMEWORKS[about["Framework"]])
        if framework.lower() in map(str.lower, words):
            found.append(name)
    if not found:
        raise SystemExit(f"No framework {framework!r}; there are: {[*FRAMEWORKS]}.")
    return found


def run(names: list[str]) -> dict[str, dict[str, Any]]:
    """What the scripts measure, by name; a script that fails has an `error`."""
    by_backend: dict[str, list[str]] = {}
    for name in names:
        backend = FRAMEWORKS[scripts()[name]["Framework"]][1]
        by_backend.setdefault(backend, []).append(name)
    found: dict[str, dict[str, Any]] = {}
    for backend, own in by_backend.items():
        process = subprocess.Popen(
            [sys.executable, "-m", "museum", "--in-this-process", *own],
            env={**os.environ, **QUIET, "KERAS_BACKEND": backend},
            cwd=FOLDER.parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            name, result = json.loads(line)
            found[name] = result
            print(row(name, result), flush=True)
        if process.wait():
            raise SystemExit(f"The process of the backend {backend} ended early.")
    return found


def run_here(names: list[str]) -> None:
    """Forks a process for each script, and prints `[name, result]` for each."""
    # Before the forks, so that it is done once.
    import keras

    import keras_strategies

    _ = keras.Model, keras_strategies.MirroredStrategy
    context = multiprocessing.get_context("fork")
    for name in names:
        ours, theirs = context.Pipe()
        process = context.Process(target=_script, args=(name, theirs))
        process.start()
        theirs.close()
        result = {"error": f"no result in {TIMEOUT} s, or the process was killed"}
        with contextlib.suppress(EOFError):
            if ours.poll(TIMEOUT):
                result = ours.recv()
        process.join(10)
        process.kill()
        print(json.dumps([name, result]), flush=True)


def _script(name: str, pipe: Any) -> None:
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            runpy.run_module(f"museum.{name}", run_name="__main__")
        pipe.send(json.loads(output.getvalue().splitlines()[-1]))
    except BaseException as error:
        traceback.print_exc()
        pipe.send({"error": repr(error)})


def row(name: str, result: dict[str, Any]) -> str:
    """A line of the printed table."""
    if "error" in result:
        return f"{name:36}failed: {result['error']}"
    numbers = [f"{result[key]:<12.6g}" for key in ("framework", "one_device", "ours")]
    return f"{name:36}{''.join(numbers)}{result['state']}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m museum", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", help="scripts; all by default")
    parser.add_argument("--framework", help="a framework, package or backend")
    parser.add_argument("--write", action="store_true", help="the page, from this run")
    parser.add_argument(
        "--in-this-process", action="store_true", help=argparse.SUPPRESS
    )
    arguments = parser.parse_args()
    names = chosen(arguments.names, arguments.framework)
    if arguments.in_this_process:
        run_here(names)
        return
    print(f"{'script':36}{'framework':12}{'one device':12}{'ours':12}state")
    found = run(names)
    if arguments.write:
        write_page({name: own for name, own in found.items() if "error" not in own})
        print(f"Wrote {RESULTS.name} and the page.")
    if any("error" in each for each in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
