"""Probable causes of differences, found by experiments on one device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np

from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.keras_compat.variables.generator_seeds import (
    create_global_generator,
)
from keras_strategies.rows.python_state import GENERATORS, PythonState
from keras_strategies.runtime.random_numbers.process_numbers import NumbersOfProcess
from keras_strategies.runtime.row_splits import split_sizes
from keras_strategies.verification.batches import Batch
from keras_strategies.verification.comparison import Precision, gaps, relative_gap
from keras_strategies.verification.trainings import Key, Observed, Script, Training

#: What the names of causes mean, and what to do.
CAUSES = {
    "": "None.",
    "unknown": (
        "No experiment explains it. Compare what the code does with the number of "
        "replicas, and report it as a bug if it does nothing."
    ),
    "model_depends_on_replicas": (
        "`build` makes another model under the strategy. Make the same one, whatever "
        "the number of replicas."
    ),
    "learning_rate_scaled": (
        "The learning rate depends on the number of replicas. Gradients are already "
        "those of the global batch: scale the rate with the global batch size, or not "
        "at all."
    ),
    "setting_depends_on_replicas": (
        "A setting of `compile` or of the optimizer depends on the number of replicas."
    ),
    "autocast_lost": (
        "Layers compute in another dtype. Give layers their dtype policy when they are "
        "made, on every device; a setting of one thread does not hold on replicas."
    ),
    "batch_size_per_replica": (
        "The batch size is that of one replica, multiplied or divided by their number. "
        "`batch_size` is that of the global batch."
    ),
    "order_of_rows": (
        "The same rows come in another order. Shuffle with a seed that does not depend "
        "on the number of replicas."
    ),
    "data_depends_on_replicas": (
        "Batches have other rows under the strategy. Read the global batch on every "
        "worker; the strategy splits it."
    ),
    "unseeded_data": (
        "The data is another one each time that it is read. Draw it from a generator "
        "with a seed that is made in `data`."
    ),
    "unseeded_random_numbers": (
        "Random numbers come from no `keras.random.SeedGenerator`. Draw them by "
        "`keras.random` with a generator that the layer makes in `__init__`."
    ),
    "not_repeatable": (
        "One device does not repeat a step: random numbers come from no "
        "`keras.random.SeedGenerator`, or state is outside of variables (a global, a "
        "closure). Use a generator or a `keras.Variable` that the layer makes."
    ),
    "python_state": (
        "State is outside of variables: an attribute that a step changes in Python. "
        "Make it a `keras.Variable` or a weight of the layer."
    ),
    "wrong_declaration": (
        "The layer is declared by `ks.row_wise`, but its rows depend on one another. "
        "Remove the declaration."
    ),
    "mixes_rows": (
        "Each replica calls the layer with its rows only, and a row of the result "
        "depends on other rows: statistics of the batch, or a sum over axis 0. Use "
        "the global batch: `sync_batch_norm=True`, or `ReplicaContext.all_reduce`."
    ),
    "same_random_numbers": (
        "Replicas draw the same random numbers. Draw them by a "
        "`keras.random.SeedGenerator`, not with a constant seed."
    ),
    "mean_of_means": (
        "It is the mean of the replicas' means, which counts rows of smaller parts "
        "more. Sum over rows, and divide by the rows or weights of the global batch."
    ),
    "scaled_by_replicas": (
        "It is multiplied or divided by the number of replicas, or its root. Gradients "
        "are summed over replicas: divide the loss by the rows of the global batch, "
        "once."
    ),
    "one_replica_only": (
        "It is that of one replica's rows. Reduce it over replicas: `strategy.reduce`, "
        "`ReplicaContext.all_reduce`, or `optimizer.apply` without "
        "`ks.gradients_are_aggregated`."
    ),
    "per_replica_function": (
        "A function that is no sum over rows (a norm, a clip, negatives of a batch, a "
        "quotient) is computed of each replica's rows. Compute it of sums over all "
        "replicas."
    ),
    "variable_left_out": (
        "The variable is not updated under the strategy. Pass all of "
        "`model.trainable_variables` to the gradients and to the optimizer on each "
        "replica."
    ),
    "lost_at_resume": (
        "It is no part of the snapshot. Keep it in a `keras.Variable` that the model "
        "or its optimizer tracks; a callback saves its state by `get_state` and "
        "`set_state`."
    ),
    "copies_differ": (
        "The copies of a variable on replicas are different. Assign the same value on "
        "all of them; if nothing in the script assigns it, suspect the device."
    ),
}
#: A combination of parts explains a difference if this much of it remains.
_EXPLAINED = 0.02


@dataclass(frozen=True)
class Situation:
    """A difference in a step, and how to repeat it.

    Args:
        script: the script.
        reference: the strategy of one device.
        before: the state before the step.
        batch: the batch of the step.
        alone: what was observed on one device from that state.
        found: what was observed under the strategy.
        replicas: int, the number of replicas.
        precision: what counts as equal.
    """

    script: Script
    reference: Any
    before: Observed
    batch: Batch
    alone: Observed
    found: Observed
    replicas: int
    precision: Precision

    def cause(self, key: Key) -> tuple[str, str]:
        """The name of the probable cause of a difference, and what has shown it."""
        own = self._of_python(key)
        if own is not None:
            return own
        kind = key[0]
        if kind == "output":
            return self._of_output(key)
        if kind in ("slot", "variable"):
            return self._of_update(key)
        if kind in ("loss", "metric", "gradient"):
            return self._of_parts(key)
        return "unknown", ""

    def _training(self) -> Training:
        return Training(self.script, self.reference, self.before, False, [self.batch])

    def _of_python(self, key: Key) -> tuple[str, str] | None:
        """Repeats the step on one device: with a new model, and with the same one."""
        training = self._training()
        training.fresh_seed()
        create_global_generator()  # Its seed is drawn from Python's generator.
        state, numbers = PythonState(training.model), NumbersOfProcess()
        first = training.step(self.batch)
        drawn = not numbers.are_unchanged()
        changes = state.change()
        if drawn:
            text = "the step draws from the generators of Python or NumPy"
            return "unseeded_random_numbers", text
        if changes is not None:
            return "python_state", changes.partition(", which")[0]
        if self._differ(self._training().step(self.batch), first):
            if generator := _generator(training.model):
                return "unseeded_random_numbers", f"{generator} draws without a seed"
            return "not_repeatable", "the same step on one device differs"
        training.restore(self.before)
        _reset_metrics(training.model)
        if self._differ(training.step(self.batch), first):
            text = "a second step of the same model from the same state differs"
            return "python_state", text
        return None

    def _differ(self, one: Observed, other: Observed) -> bool:
        tolerance = max(self.precision.tolerance, 1e-4)
        return any(gap > tolerance for gap in gaps(one, other, self.precision).values())

    # Layers.

    def _of_output(self, key: Key) -> tuple[str, str]:
        alone, found = self.alone, self.found
        dtypes = alone.dtypes.get(key), found.dtypes.get(key)
        if dtypes[0] != dtypes[1]:
            return "autocast_lost", f"{dtypes[0]} on one device, found {dtypes[1]}"
        one, other = alone.values[key], found.values.get(key)
        if other is None or other.shape != one.shape:
            return "unknown", "the output is missing, or has another shape"
        for text, factor in factors(self.replicas):
            if relative_gap(one * factor, other, 0.0) < 1e-4:
                return "scaled_by_replicas", f"it is {text} that of one device"
        outputs = [
            self._training().outputs(part)[0].values.get(key) for part in self._parts
        ]
        is_random = self._is_random(key)
        same = [each for each in outputs if each is not None and each.ndim]
        if len(same) == len(self._parts):
            joined = np.concatenate(same)
            if relative_gap(other, joined, 0.0) <= max(self.precision.tolerance, 1e-4):
                if is_random:
                    return "same_random_numbers", "each replica draws as if alone"
                return "mixes_rows", "replicas' rows give it when they are called alone"
        if is_random:
            return "same_random_numbers", "the layer draws other numbers"
        return "mixes_rows", "the layer gives other results for parts of a batch"

    def _is_random(self, key: Key) -> bool:
        """Whether equal rows have other outputs, as with numbers drawn for rows."""
        first = self.batch.part(0, 1)
        rows = [first.parts] * min(4, self.batch.rows)
        equal = keras.tree.map_structure(lambda *own: np.concatenate(own), *rows)
        found = self._training().outputs(Batch(equal))[0].values.get(key)
        if found is None or not found.ndim:
            return False
        return relative_gap(np.broadcast_to(found[:1], found.shape), found, 0.0) > 1e-3

    # Losses, metrics and gradients: combinations of those of the replicas' rows.

    @cached_property
    def _parts(self) -> list[Batch]:
        bounds = np.cumsum([0, *split_sizes(self.batch.rows, self.replicas)])
        found = [
            self.batch.part(int(start), int(stop))
            for start, stop in itertools.pairwise(bounds)
        ]
        return [part for part in found if part.rows]

    @cached_property
    def _of_each_part(self) -> list[Observed]:
        return [self._training().step(part) for part in self._parts]

    def _of_parts(self, key: Key) -> tuple[str, str]:
        alone, found = self.alone.values[key], self.found.values.get(key)
        if found is None or found.shape != alone.shape:
            return "unknown", "the value is missing, or has another shape"
        if key[0] == "gradient" and not np.any(found) and np.any(alone):
            return "variable_left_out", "its gradient is zero"
        parts = [np.asarray(each.values[key], "float64") for each in self._of_each_part]
        count, rows = len(parts), [part.rows for part in self._parts]
        scaled = [(f"{text} that of one device", c) for text, c in factors(count)]
        candidates = [("scaled_by_replicas", text, alone * c) for text, c in scaled]
        total = np.sum(parts, axis=0)
        weights = [n / sum(rows) for n in rows]
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            text = f"that of replica {i}"
            candidates.append(("one_replica_only", text, part))
            text = f"that of replica {i}, not divided by the global batch"
            candidates.append(("one_replica_only", text, part * weight))
        gap = min(relative_gap(alone, found, 0.0), 1.0)
        mean = np.average(parts, axis=0, weights=rows)
        is_mean = relative_gap(alone, mean, 0.0) <= _EXPLAINED * gap
        if is_mean:
            candidates.append(
                ("mean_of_means", "the mean of the replicas'", total / count)
            )
            candidates.append(("scaled_by_replicas", "the sum of the replicas'", total))
        left = [
            (relative_gap(value, found, 0.0), i)
            for i, (*_, value) in enumerate(candidates)
        ]
        best, index = min(left)
        if best <= _EXPLAINED * gap:
            cause, text, _ = candidates[index]
            return cause, f"it is {text}"
        if not is_mean:
            return "per_replica_function", "on one device it is no mean over rows"
        return "unknown", ""

    def _of_update(self, key: Key) -> tuple[str, str]:
        kind, name = key[0], self.alone.names[key]
        alone, found = self.alone.values[key], self.found.values[key]
        before = self.before.values.get(key)
        if "learning_rate" in name:
            return "learning_rate_scaled", _ratio_text(alone, found)
        if before is None or before.shape != alone.shape:
            return "unknown", ""
        moved, other = alone - before, found - before
        if not np.any(other) and np.any(moved):
            return "variable_left_out", "it keeps its value"
        count = len(self._parts)
        for text, factor in factors(count):
            if kind == "variable" and relative_gap(moved * factor, other, 0.0) < 1e-2:
                return (
                    "learning_rate_scaled",
                    f"the update is {text} that of one device",
                )
        if kind == "variable":
            parts = [each.values.get(key, before) for each in self._of_each_part]
            for i, part in enumerate(parts):
                if np.any(part != before) and relative_gap(part, found, 0.0) < 1e-5:
                    return "one_replica_only", f"it is that of replica {i}"
        return "unknown", ""


def factors(count: int) -> list[tuple[str, float]]:
    """Factors that a number of replicas may have caused, in words."""
    return [
        (f"{count} times", count),
        (f"1/{count} of", 1 / count),
        (f"the square root of {count} times", count**0.5),
        (f"1 / the square root of {count} of", count**-0.5),
        (f"{count * count} times", count**2),
        (f"1/{count * count} of", count**-2),
    ]


def _ratio_text(alone: np.ndarray, found: np.ndarray) -> str:
    return f"{float(alone):g} on one device, found {float(found):g}"


def _generator(model: Any) -> str | None:
    """A generator of random numbers that a layer holds."""
    for layer in sublayers(model):
        for name, value in vars(layer).items():
            if isinstance(value, GENERATORS):
                return f"{name!r} of layer {layer.name!r}"
    return None


def _reset_metrics(model: Any) -> None:
    if model.compiled:
        model.reset_metrics()
