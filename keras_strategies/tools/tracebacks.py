"""Tracebacks with which launched tasks have ended: each error once."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from keras_strategies.processes import task_output
from keras_strategies.processes.launcher import Ended


def print_line(text: str, label: str = "launch") -> None:
    """Prints lines of the launcher, or of the tasks that a label names."""
    for line in text.splitlines():
        task_output.write(sys.stderr, label, line)


def print_tracebacks(ended: Iterable[Ended], first: Ended | None = None) -> None:
    """Prints one traceback for all tasks that have ended with the same error.

    That of the first failure comes last, since the others follow from it. If the
    tracebacks of an error differ, each is written to a file.

    Args:
        ended: the tasks.
        first: the one of them that has failed first, or None.
    """
    groups: dict[str, list[Ended]] = {}
    for each in ended:
        if each.traceback:
            groups.setdefault(each.error, []).append(each)
    of_first = groups.pop(first.error, []) if first is not None else []
    for group in groups.values():
        _print_group(group)
    if first is not None and of_first:
        if groups:
            print_line(f"{first.task} failed first:")
        of_first.sort(key=lambda each: each.task != first.task)
        _print_group(of_first)


def _print_group(group: Sequence[Ended]) -> None:
    names = _names(group)
    print_line(group[0].traceback, names)
    if len({each.traceback for each in group}) > 1:
        folder = Path(tempfile.mkdtemp(prefix="keras-strategies-tracebacks-"))
        for each in group:
            path = folder / f"{each.task}.txt".replace(" ", "-")
            path.write_text(f"{each.traceback}\n")
        print_line(
            f"{names} have this error with different tracebacks; shown is that of "
            f"{group[0].task}, all are in {folder}"
        )


def _names(group: Iterable[Ended]) -> str:
    """The names of tasks, such as "workers 0-2, 5"."""
    names = []
    tasks = sorted({(each.task.job, each.task.index) for each in group})
    for job, own in itertools.groupby(tasks, key=lambda task: task[0]):
        indices = [index for _, index in own]
        runs: list[list[int]] = []
        for index in indices:
            if runs and runs[-1][-1] == index - 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        spans = [f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in runs]
        names.append(f"{job}{'s' if indices[1:] else ''} {', '.join(spans)}")
    return ", ".join(names)
