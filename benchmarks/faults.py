"""Faults of workers, and the seconds until the others have an error that says so.

Each fault of the tests (`tests/multi_worker/faulty.py`) happens in a cluster of real
processes with `CommunicationOptions(timeout_seconds=5)`. The clock runs from the fault,
or from the meeting where a worker never comes, until the slowest of the others has its
error, and until its process has ended. The two are one where XLA cannot be made to
leave a collective, so that the process is ended with the error.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from measuring import BACKENDS, Results, options_parser, run_script
from page import write_page
from tables import markdown_table

HERE = Path(__file__).parent
# What a process says that XLA holds in a collective: it is ended, with the error.
ENDED = "still waits for it"


def cases() -> dict[str, tuple]:
    """What `FaultCase` takes, by the name of the fault."""
    return {
        "a worker is killed; the others wait in a collective": ("kill", "callback"),
        "a worker is killed; the others wait for its batch": ("kill", "data"),
        "the chief is killed": ("kill", "callback", 0),
        "the chief is killed while it saves": ("kill", "saving", 0),
        "a worker is stopped (SIGSTOP)": ("stop", "callback"),
        "the chief is stopped (SIGSTOP)": ("stop", "data", 0),
        "a worker raises": ("raise", "callback"),
        "a worker's data raises": ("raise", "data"),
        "a worker ends with exit code 0": ("exit", "callback"),
        "a worker never starts": ("missing",),
        "the chief never starts": ("missing", "", 0),
        "a worker has another batch size": ("batch",),
        "two workers have one index": ("twin", "", 1, 3),
    }


def measure() -> dict[str, list[float]]:
    """Seconds until the error, and until the end, of each fault."""
    sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
    from multi_worker.faults import FaultCase, Forker, run_fault

    found = {}
    with Forker() as forker:
        for name, case in (
            (name, FaultCase(*given)) for name, given in cases().items()
        ):
            with tempfile.TemporaryDirectory() as folder:
                outcomes = run_fault(forker, case, Path(folder))
            others = [outcomes[number] for number in case.others]
            for each in others:
                is_ended = ENDED in each.log
                if not (each.error or is_ended) or each.code != 1:
                    raise SystemExit(f"{name}: no error in\n{each.log}")
            found[name] = [
                max(e.seconds if e.error else e.end_seconds for e in others),
                max(each.end_seconds for each in others),
            ]
            print(f"{name}: {found[name][0]:.2f} s", file=sys.stderr, flush=True)
    return found


def table(results: dict[str, dict[str, list[float]]]) -> str:
    """The results as a Markdown table."""
    backends = [backend for backend in BACKENDS if backend in results]
    rows = [
        [name, *(f"{results[backend][name][0]:.1f} s" for backend in backends)]
        for name in results[backends[0]]
    ]
    return markdown_table(["fault", *backends], rows)


def main() -> None:
    parser = options_parser(__doc__, BACKENDS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(measure()))
        return
    known = Results(options.output / "faults.json")
    for backend in options.backends:
        known.put(backend, run_script(__file__, "--worker", backend=backend))
    print(table(known.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
