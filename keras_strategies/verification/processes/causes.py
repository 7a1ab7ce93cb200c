"""Probable causes of differences between processes and one process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keras_strategies.verification.causes import factors
from keras_strategies.verification.comparison import relative_gap
from keras_strategies.verification.processes.comparison import (
    EVERY_RANK,
    Found,
    Runs,
)
from keras_strategies.verification.processes.records import Arrays, StepRecord

#: What to do, where it is not what `ks.verify` advises about a strategy.
ADVICE = {
    "batch_size_per_replica": (
        "Each process takes as many rows as one process alone. Divide the batch size "
        "by the number of processes, and let the sampler share the rows."
    ),
    "data_depends_on_replicas": (
        "The processes together do not read the rows that one process reads. Use a "
        "sampler that shares an epoch without repeated or dropped rows, with the same "
        "seed and `set_epoch` in all processes."
    ),
    "same_random_numbers": (
        "All processes draw the same masks for different rows. Seed each process "
        "with its rank, after the weights are made."
    ),
    "unseeded_random_numbers": (
        "Processes draw other random numbers than one process would for the same rows. "
        "Draw them from a seed and the row's number, or leave this part out of the "
        "comparison."
    ),
    "mixes_rows": (
        "A process computes it of its own rows, and it depends on all of them. Use "
        "synchronized batch normalization, or gather the rows."
    ),
    "mean_of_means": (
        "It is the mean of the processes' means, which count unequal numbers of rows, "
        "weights or tokens. Sum over all, and divide by the sum of the counts."
    ),
    "scaled_by_replicas": (
        "It is multiplied or divided by the number of processes, or its root. DDP and "
        "FSDP average gradients over processes; `tf.distribute` sums them. Scale once."
    ),
    "one_replica_only": (
        "It is that of one process. Reduce or gather it over all; call the wrapped "
        "model, not the module in it."
    ),
    "variable_left_out": (
        "The variable gets no gradient, or no update. Pass all parameters to the "
        "optimizer, and call all modules."
    ),
    "copies_differ": (
        "Processes have different values of a variable. Broadcast the weights of one "
        "process at the start, and update them together."
    ),
    "model_depends_on_replicas": (
        "The model begins with other weights than in one process. Make it the same "
        "way, and draw nothing before that depends on the rank."
    ),
    "unknown": (
        "No rule explains it. Compare what the script does with the rank and the "
        "number of processes."
    ),
}
_CLOSE = 1e-3


@dataclass(frozen=True)
class Causes:
    """Rules for the first differences.

    Args:
        runs: the records.
        found: list of `Found`, those of the first step that has any.
    """

    runs: Runs
    found: list[Found]

    def cause(self) -> tuple[str, str]:
        """The name of the cause, and what has shown it."""
        first = self.found[0]
        if (statistics := self._moving_statistics())[0]:
            return statistics
        rules = {
            "batch": self._of_rows,
            "copy": self._of_copies,
            "setting": self._of_setting,
            "output": self._of_output,
            "gradient": self._of_gradients,
            "variable": self._of_variables,
        }
        return rules.get(first.kind, self._of_value)(first)

    def _moving_statistics(self) -> tuple[str, str]:
        """Those of Keras's batch normalization, of which no outputs are observed."""
        own = [each for each in self.found if "/moving_" in each.name and each.step]
        if not own or self.found[0].kind not in ("loss", "metric", "variable"):
            return "", ""
        return "mixes_rows", f"{own[0].name} is that of a part of the batch"

    def _steps(self, first: Found) -> tuple[StepRecord, list[StepRecord]]:
        i = first.step - 1
        return self.runs.alone.steps[i], [rank.steps[i] for rank in self.runs.ranks]

    def _of_rows(self, first: Found) -> tuple[str, str]:
        if first.name == "rows" and first.step == 1 and first.text != EVERY_RANK:
            alone, ranks = self._steps(first)
            counts = {len(each.rows) for each in ranks}
            if counts == {len(alone.rows)}:
                return "batch_size_per_replica", f"{len(alone.rows)} rows on each rank"
        return "data_depends_on_replicas", first.text

    def _of_copies(self, first: Found) -> tuple[str, str]:
        when = "before the first step" if not first.step else "after the step"
        return "copies_differ", f"ranks have other values {when}"

    def _of_setting(self, first: Found) -> tuple[str, str]:
        if first.name.startswith(("lr", "learning_rate")):
            values = first.alone[first.name], first.every[0].get(first.name)
            return "learning_rate_scaled", f"{values[0]} on one device, {values[1]}"
        return "setting_depends_on_replicas", ""

    def _of_output(self, first: Found) -> tuple[str, str]:
        name = first.name.partition(" call ")[0].partition("[")[0]
        if any(name in rank.random for rank in self.runs.ranks):
            return "unseeded_random_numbers", "it draws from the process's generator"
        found = self._factor(first.alone, first.every[0], [first.name])
        if found[0]:
            return found
        return "mixes_rows", "the same rows have other results in parts of the batch"

    def _factor(
        self, alone: Arrays, other: Arrays, names: list[str]
    ) -> tuple[str, str]:
        """Whether all values are those of one process times a number."""
        own = [name for name in names if name in other]
        one, two = (_joined(each, own) for each in (alone, other))
        if not one.size or one.shape != two.shape:
            return "", ""
        for text, factor in factors(self.runs.replicas):
            if relative_gap(one * factor, two, 0.0) < _CLOSE:
                return "scaled_by_replicas", f"it is {text} that of one device"
        return "", ""

    def _of_gradients(self, first: Found) -> tuple[str, str]:
        alone, ranks = self._steps(first)
        names = [each.name for each in self.found if each.kind == "gradient"]
        every = [each.gradients for each in ranks]
        for name in names:
            is_left_out = not all(np.any(own.get(name, 0)) for own in every)
            if is_left_out and np.any(alone.gradients[name]):
                return "variable_left_out", f"{name} has no gradient"
        if (found := self._of_unequal(alone.gradients, every, names))[0]:
            return found
        if (found := self._factor(alone.gradients, every[0], names))[0]:
            return found
        return self._of_losses(alone, ranks)

    def _of_unequal(
        self, alone: Arrays, every: list[Arrays], names: list[str]
    ) -> tuple[str, str]:
        """Values that are not reduced over ranks."""
        own = [_joined(each, names) for each in every]
        one = _joined(alone, names)
        if len(own) < 2 or any(each.shape != one.shape for each in own):
            return "", ""
        if all(relative_gap(own[0], each, 0.0) < _CLOSE for each in own[1:]):
            return "", ""
        for text, value in (("mean", np.mean(own, 0)), ("sum", np.sum(own, 0))):
            if relative_gap(one, value, 0.0) < _CLOSE:
                return "one_replica_only", f"the ranks' {text} is that of one device"
        return "one_replica_only", "ranks have other values"

    def _of_losses(self, alone: StepRecord, ranks: list[StepRecord]) -> tuple[str, str]:
        """Causes of gradients that ranks share, from the losses of ranks."""
        lists = [each.losses for each in (alone, *ranks)]
        if not all(lists):
            return "unknown", ""
        one, *own = (float(np.mean(each)) for each in lists)
        rows = [len(each.rows) for each in ranks]
        mean = float(np.mean(own))
        if _near(mean, one):
            text = "the mean of the ranks' losses is the loss, and gradients differ"
            return "per_replica_function", text
        if sum(rows) and _near(float(np.average(own, weights=rows)), one):
            text = "weighted by their rows, the ranks' losses have the right mean"
            return "mean_of_means", text
        if min(own) <= one <= max(own) or len({len(each) for each in lists}) > 1:
            text = "the ranks' losses have other weights than in their mean"
            return "mean_of_means", text
        return "per_replica_function", "the loss is no mean of the ranks' losses"

    def _of_variables(self, first: Found) -> tuple[str, str]:
        if not first.step:
            return "model_depends_on_replicas", "the weights before the first step"
        names = [each.name for each in self.found if each.kind == "variable"]
        alone, ranks = self._steps(first)
        i = first.step - 1
        before = self.runs.alone.steps[i - 1].variables if i else self.runs.alone.start
        own = [
            # A loop of one's own is observed from its first step on.
            {n: v - before.get(n, 0) for n, v in each.variables.items() if n in names}
            for each in (alone, *ranks)
        ]
        moved = [name for name in names if _is_float(own[0].get(name))]
        if moved and not any(np.any(own[1].get(name, 0)) for name in moved):
            return "variable_left_out", "it keeps its value"
        if (found := self._of_unequal(own[0], own[1:], moved))[0]:
            return found
        if clips := [name for name in alone.settings if "clip" in name]:
            return "per_replica_function", f"losses are equal, and there is {clips[0]}"
        found = self._factor(own[0], own[1], moved)
        if found[0]:
            text = found[1].replace("it is", "the update is")
            return "learning_rate_scaled", text
        if not alone.gradients:  # Of programs.
            return "mean_of_means", "losses are equal, and the update is not"
        return "per_replica_function", "gradients are equal, and the update is not"

    def _of_value(self, first: Found) -> tuple[str, str]:
        name, one = first.name, first.alone[first.name]
        every = [each[name] for each in first.every if name in each]
        if not every:
            return "one_replica_only", "rank 0 has no such value"
        if len(every) == 1 and one.shape[:1] == (1,) != every[0].shape[:1]:
            # Of `pmap`: a value for each device.
            one, every = one[0], [*every[0]]
        if any(each.shape != one.shape for each in every):
            return "one_replica_only", f"shape {every[0].shape} in place of {one.shape}"
        alone, found_values = {name: one}, [{name: each} for each in every]
        if (found := self._of_unequal(alone, found_values, [name]))[0]:
            return found
        if (found := self._factor(alone, found_values[0], [name]))[0]:
            return found
        return "mean_of_means", "ranks share a value that is not that of all rows"


def _joined(values: Arrays, names: list[str]) -> np.ndarray:
    own = [np.ravel(values[name]).astype("float64") for name in names if name in values]
    return np.concatenate(own) if own else np.zeros(0)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-4 * max(abs(one), abs(other), 1e-12)


def _is_float(value: np.ndarray | None) -> bool:
    return value is not None and np.issubdtype(value.dtype, np.floating)
