"""The command `keras-strategies top`: processes of a run, and who waits for whom."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import time
from typing import Any

from keras_strategies.text_tables import Table, counted
from keras_strategies.timeline.watch import SHARES, Report, Row, Watch

_NUMBERS = frozenset({"step", "steps/s", "rows/s", *SHARES})
# Shorter waits change too often to be read.
_SHOWN = 0.5
_NONE = (
    "keras-strategies top: no process of {} on this machine trains{}. Runs of this "
    "user are seen that have created a strategy of several workers, or begun `fit`."
)


def top_command(options: argparse.Namespace) -> int:
    """Shows a run until it ends, or Ctrl-C.

    Args:
        options: those of the command.

    Returns:
        int, the exit code: 1 if there is no such run.
    """
    watch = Watch(options.run)
    if not watch.look().rows:
        of = f"run {options.run!r}" if options.run else "any run"
        print(_NONE.format(of, "" if options.run else " now"), file=sys.stderr)
        return 1
    height = 0
    try:
        while True:
            time.sleep(options.seconds)
            report = watch.look()
            if not report.rows:
                return 0
            text = json.dumps(as_json(report)) if options.json else as_text(report)
            if height and sys.stdout.isatty() and not options.json:
                # To the first line of the last report, and clear from there.
                sys.stdout.write(f"\x1b[{height}F\x1b[J")
            print(text, flush=True)
            height = _height(text)
            if options.once or not any(row.now.is_alive for row in report.rows):
                return 0
    except KeyboardInterrupt:
        return 0


def _height(text: str) -> int:
    """The lines that a text takes on the terminal."""
    columns = max(1, shutil.get_terminal_size().columns)
    return sum(max(1, -(-len(line) // columns)) for line in text.splitlines())


def as_json(report: Report) -> dict[str, Any]:
    """A report as JSON."""
    return {
        "run": report.rows[0].now.run,
        "awaited": list(report.awaited),
        "workers": [
            {name: value for name, value in vars(row.now).items() if name != "ring"}
            | {
                "rows_per_second": row.rows,
                "steps_per_second": row.steps,
                "shares": dict(row.shares),
            }
            for row in report.rows
        ],
        "others": report.others,
        "findings": [
            dataclasses.asdict(each) | {"text": str(each)} for each in report.findings
        ],
    }


def as_text(report: Report) -> str:
    """A report as a table, with the workers that others wait for below it."""
    first, rows = report.rows[0].now, report.rows
    title = f"{first.script}: {counted(len(rows), 'worker')}, run {first.run}"
    header = ("worker", "process", "step", "steps/s", "rows/s", *SHARES, "now")
    cells = tuple(_cells(row, report.awaited) for row in rows)
    table = str(Table(title, header, cells, _NUMBERS))
    notes = [report.others] if report.others else []
    return "\n".join([table, *map(str, report.findings), *notes])


def _cells(row: Row, awaited: tuple[int, ...]) -> tuple[str, ...]:
    shares = (f"{100 * row.shares[name]:.0f}%" for name in SHARES)
    now = row.now
    return (
        f"{now.worker}",
        f"{now.pid}",
        f"{now.steps}",
        f"{row.steps:.1f}",
        f"{row.rows:.0f}",
        *shares,
        _doing(row, awaited),
    )


def _doing(row: Row, awaited: tuple[int, ...]) -> str:
    now = row.now
    if not now.is_alive:
        return "has ended"
    text = now.state if row.how != "stopped" else f"stopped in {now.state}"
    if now.seconds >= _SHOWN:
        text = f"{text} {now.seconds:.1f} s"
        if awaited and now.worker not in awaited:
            text += f", for {', '.join(map(str, awaited[:3]))}"
        else:
            text += f", {_short(now.place)}" if now.place else ""
    return text


def _short(place: str) -> str:
    """The name of a place's file, and its line."""
    file, _, rest = place.partition(", line ")
    return f"{os.path.basename(file)}:{rest.partition(',')[0]}"
