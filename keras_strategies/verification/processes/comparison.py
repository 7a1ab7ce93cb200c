"""The first difference between processes and one, in the order of computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from keras_strategies.verification.comparison import NOISE_FACTOR, few, relative_gap
from keras_strategies.verification.processes.records import (
    Arrays,
    ProcessRecord,
    StepRecord,
)
from keras_strategies.verification.report import Difference

#: Of the largest value of all gradients: less of one is rounding.
_OF_OTHERS = 1e-3
EVERY_RANK = "every rank reads the same rows"


@dataclass(frozen=True)
class Runs:
    """Records of a training.

    Args:
        alone: that of one process.
        ranks: those of the processes.
        tolerance: float, the relative difference that counts as equal.
        noisy: that of one process with weights that differ in their last digits; None
            until something differs.
        replicas: int, the number of processes times the devices of each.
    """

    alone: ProcessRecord
    ranks: list[ProcessRecord]
    tolerance: float
    noisy: ProcessRecord | None = None
    replicas: int = 2


@dataclass
class Found:
    """A difference, and where it was found.

    Args:
        kind, name: str.
        step: int, from 1; 0 before the first.
        alone, found: dicts of all values of the kind; those of rank 0.
        every: list of `found` of all ranks.
        text: str, in place of values.
    """

    kind: str
    name: str
    step: int
    alone: Arrays = field(default_factory=dict)
    every: list[Arrays] = field(default_factory=list)
    gap: float = float("inf")
    noise: float | None = None
    text: str = ""

    def difference(self) -> Difference:
        """The row of the report."""
        shown = [
            few(own[self.name]) if self.name in own else "missing"
            for own in (self.alone, *self.every[:1])
        ] or [""]
        texts = ("", self.text) if self.text else (shown[0], shown[-1])
        return Difference(self.step, self.kind, self.name, self.gap, self.noise, *texts)


def rows_of_step(step: StepRecord) -> Counter[int]:
    return Counter(step.rows)


def differences(runs: Runs) -> Iterator[Found]:
    """All differences of the first step that has any."""
    ranks = runs.ranks
    first = [
        *_of(runs, "variable", 0, runs.alone.start, [r.start for r in ranks], None),
        *_copies(runs, 0, [r.start for r in ranks]),
    ]
    if first:
        yield from first
        return
    for i in range(len(runs.alone.steps)):
        if any(i >= len(rank.steps) for rank in ranks):
            break
        own = [*_of_step(runs, i)]
        if own:
            yield from own
            return
    yield from _of_end(runs)


def _of_step(runs: Runs, i: int) -> Iterator[Found]:
    alone, ranks = runs.alone.steps[i], [rank.steps[i] for rank in runs.ranks]
    noisy = None if runs.noisy is None else runs.noisy.steps[i]
    settings = {name: np.array(value) for name, value in alone.settings.items()}
    every = [{n: np.array(v) for n, v in each.settings.items()} for each in ranks]
    yield from _of(runs, "setting", i + 1, settings, every, None)
    if problem := rows_problem(alone, ranks, runs.ranks[0].sharded):
        yield Found("batch", "rows", i + 1, text=problem)
        return
    joined = joined_outputs(alone, ranks)
    if joined is not None:
        own = noisy.outputs() if noisy else None
        yield from _of(runs, "output", i + 1, alone.outputs(), [joined], own)
    for kind, name in (
        ("metric", "values"),
        ("gradient", "gradients"),
        ("variable", "variables"),
        ("metric", "after"),
    ):
        others = [getattr(each, name) for each in ranks]
        disturbed = None if noisy is None else getattr(noisy, name)
        yield from _of(runs, kind, i + 1, getattr(alone, name), others, disturbed)
    yield from _copies(runs, i + 1, [each.variables for each in ranks])


def _of_end(runs: Runs) -> Iterator[Found]:
    alone, ranks = runs.alone, runs.ranks
    counts = [len(rank.steps) for rank in ranks]
    if set(counts) != {len(alone.steps)}:
        text = f"{counts} steps on the ranks, {len(alone.steps)} on one device"
        yield Found("batch", "steps", min(counts) + 1, text=text)
        return
    last = len(alone.steps)
    own = [Counter(rank.evaluated + rank.end.rows) for rank in ranks]
    evaluated, alone_evaluated = sum(own, Counter[int]()), Counter(alone.evaluated)
    alone_evaluated.update(alone.end.rows)
    # Where each rank evaluates all rows, as often as one process, all is well.
    is_shared = any(each != alone_evaluated for each in own)
    if evaluated and is_shared and evaluated != alone_evaluated:
        text = _rows_text(alone_evaluated, evaluated)
        yield Found("batch", "rows without gradients", last, text=text)
    noisy = None if runs.noisy is None else runs.noisy.end
    others = [rank.end.values for rank in ranks]
    disturbed = None if noisy is None else noisy.values
    yield from _of(runs, "metric", last, alone.end.values, others, disturbed)
    # Ranks that save nothing leave it to others.
    saved = [rank.saved for rank in ranks if rank.saved]
    if saved or alone.saved:
        disturbed = None if runs.noisy is None else runs.noisy.saved
        yield from _of(runs, "saved", last, alone.saved, saved or [{}], disturbed)


def rows_problem(alone: StepRecord, ranks: list[StepRecord], is_sharded: bool) -> str:
    """What is wrong with the rows of a step; empty if they are the same."""
    own = [rows_of_step(each) for each in ranks]
    wanted, found = rows_of_step(alone), sum(own, Counter[int]())
    if not wanted or wanted == found:
        return ""
    if len(own) > 1 and found and all(each == own[0] for each in own):
        # Of tensor parallelism, or a loader without a sampler.
        return "" if is_sharded else EVERY_RANK
    return _rows_text(wanted, found)


def _rows_text(wanted: Counter[int], found: Counter[int]) -> str:
    repeated = sum((found - wanted)[row] for row in found if row in wanted)
    missing = sum((wanted - found).values())
    new = sum((found - wanted).values()) - repeated
    parts = [f"{found.total()} rows, {wanted.total()} on one device"]
    for count, text in ((repeated, "repeated"), (missing, "missing"), (new, "other")):
        parts += [f"{count} {text}"] if count else []
    return ", ".join(parts)


def joined_outputs(alone: StepRecord, ranks: list[StepRecord]) -> Arrays | None:
    """Outputs of all ranks in the order of the rows of one process; None if unknown."""
    places: dict[int, list[int]] = {}
    for i, row in enumerate([row for each in ranks for row in each.rows]):
        places.setdefault(row, []).append(i)
    if rows_of_step(alone) != Counter({row: len(own) for row, own in places.items()}):
        return None
    order = [places[row].pop(0) for row in alone.rows]
    own = [each.outputs() for each in ranks if each.rows]
    if not own:
        return None
    return {
        name: np.concatenate([each[name] for each in own])[order]
        for name in own[0]
        if all(name in each for each in own)
        and len({each[name].shape[1:] for each in own}) == 1
    }


def _of(
    runs: Runs,
    kind: str,
    step: int,
    alone: Arrays,
    every: list[Arrays],
    noisy: Arrays | None,
) -> Iterator[Found]:
    """Differences of one kind between one process and rank 0."""
    found = every[0]
    least, kinds = 0.0, {}
    if kind == "metric":
        kinds = {name: "loss" for name in alone if name.rpartition("_")[2] == "loss"}
    if kind == "gradient" and alone:
        least = _OF_OTHERS * max(np.abs(v).max(initial=0.0) for v in alone.values())
    for name, one in alone.items():
        other = found.get(name)
        if other is None:
            if kind == "output":
                continue
            yield Found(kinds.get(name, kind), name, step, alone, every, text="missing")
            continue
        gap = relative_gap(np.asarray(one), np.asarray(other), least)
        noise = None
        if noisy is not None and name in noisy:
            noise = relative_gap(np.asarray(one), np.asarray(noisy[name]), least)
        if gap > max(runs.tolerance, NOISE_FACTOR * (noise or 0.0)):
            yield Found(kinds.get(name, kind), name, step, alone, every, gap, noise)


def _copies(runs: Runs, step: int, every: list[Arrays]) -> Iterator[Found]:
    """Variables of which ranks have different values."""
    for name, one in every[0].items():
        for other in every[1:]:
            if name in other and relative_gap(one, other[name], 0.0) > runs.tolerance:
                gap = relative_gap(one, other[name], 0.0)
                yield Found("copy", name, step, every[0], [other, *every], gap)
                break
