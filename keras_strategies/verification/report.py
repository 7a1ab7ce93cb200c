"""The report of `ks.verify`."""

from __future__ import annotations

import html
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import keras

from keras_strategies.text_tables import Table
from keras_strategies.verification.causes import CAUSES
from keras_strategies.verification.picture import DIFFERENT, EQUAL, picture

_MOST_ROWS = 8


@dataclass(frozen=True)
class Difference:
    """A value that differs from that of one device.

    Args:
        step: int, from 1; 0 before the first.
        kind: str, such as `"output"`, `"loss"`, `"metric"`, `"gradient"`, `"slot"` or
            `"variable"`.
        name: str, of the layer, metric or variable.
        gap: float, the largest difference, relative to the largest value.
        noise: float, the same for two trainings on one device from weights that differ
            in their last digits; None where it was not measured.
        alone: str, the first values on one device.
        found: str, those under the strategy.
    """

    step: int
    kind: str
    name: str
    gap: float
    noise: float | None
    alone: str
    found: str


@dataclass(frozen=True)
class VerificationReport:
    """Whether training under a strategy equals that on one device; true if it does.

    Prints as text, and as a picture and tables in a notebook.

    Args:
        strategy: str, the strategy.
        reference: str, what it was compared with.
        steps: int, the steps that were compared.
        tolerance: float, the relative difference that counts as equal.
        differences: tuple of `Difference`, in the order of computation, of the first
            step that differs; empty if all values are equal.
        cause: str, the name of the probable cause, a key of `causes()`; empty if all
            values are equal.
        evidence: str, what has shown the cause.
        notes: tuple of str, what could not be observed.
        steps_taken: dict from `"one device"` and `"strategy"` to the number of steps
            that were taken, those of experiments too.
        seed: int, the seed of both trainings.
        checksums: dict of the checksums of the batches, and of the weights at the end
            on one device and under the strategy.
        versions: dict of the versions of Python, Keras, the framework and this package.
        advice: str, what to do; empty for what `causes()` says.
    """

    strategy: str
    reference: str
    steps: int
    tolerance: float
    differences: tuple[Difference, ...]
    cause: str
    evidence: str
    notes: tuple[str, ...]
    steps_taken: dict[str, int]
    seed: int
    checksums: dict[str, str]
    versions: dict[str, str]
    advice: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "advice", self.advice or CAUSES[self.cause])

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of computation; None if there is none."""
        return self.differences[0] if self.differences else None

    def __bool__(self) -> bool:
        return self.equal

    def raise_if_different(self) -> VerificationReport:
        """Returns the report if nothing differs.

        Raises:
            AssertionError: with the text of the report, if something differs.
        """
        if not self.equal:
            raise AssertionError(f"\n{self}")
        return self

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the report to a JSON file, with versions, seed and checksums.

        Args:
            path: the file.
        """
        found = {"equal": self.equal, **asdict(self)}
        Path(path).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")

    def _verdict(self) -> str:
        if self.first is None:
            return f"equal in {self.steps} step{'s' * (self.steps > 1)}"
        first = self.first
        when = f"step {first.step}" if first.step else "before the first step"
        return f"different from {when}, at first: {first.kind} {first.name!r}"

    def _table(self) -> Table:
        rows = tuple(
            (
                str(each.step),
                each.kind,
                each.name,
                f"{each.gap:.1e}",
                "" if each.noise is None else f"{each.noise:.1e}",
                each.alone,
                each.found,
            )
            for each in self.differences[:_MOST_ROWS]
        )
        facts = [("verdict", self._verdict())]
        if self.cause:
            shown = f" ({self.evidence})" if self.evidence else ""
            facts.append(("probable cause", f"{self.cause}{shown}"))
            facts.append(("what to do", self.advice))
        more = len(self.differences) - len(rows)
        if more > 0:
            facts.append(("not shown", f"{more} differences"))
        facts.append(("compared with", self.reference))
        facts.append(("tolerance", f"{self.tolerance:g} of the largest value"))
        taken = (f"{count} {name}" for name, count in self.steps_taken.items())
        facts.append(("steps taken", ", ".join(taken)))
        header = ("step", "kind", "name", "difference", "noise", "one device", "found")
        numbers = frozenset({"step", "difference", "noise"})
        note = "\n".join(self.notes)
        title = f"Verification of {self.strategy}"
        return Table(title, header, rows, numbers, facts=tuple(facts), note=note)

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        color = EQUAL if self.equal else DIFFERENT
        largest: dict[str, float] = {}
        for each in self.differences:
            largest[each.kind] = max(each.gap, largest.get(each.kind, 0.0))
        verdict = html.escape(self._verdict())
        return (
            f"<p style='color:{color}'><b>{verdict}</b></p>{picture(largest)}"
            f"{self._table()._repr_html_()}"
        )


def causes() -> dict[str, str]:
    """The names of probable causes, and what to do about them."""
    return {name: text for name, text in CAUSES.items() if name}


def versions(frameworks: dict[str, str]) -> dict[str, str]:
    """Those of Python, Keras, the frameworks and this package."""
    package = __name__.partition(".")[0]
    return {
        "python": platform.python_version(),
        "keras": keras.__version__,
        **frameworks,
        package: sys.modules[package].__version__,
    }
