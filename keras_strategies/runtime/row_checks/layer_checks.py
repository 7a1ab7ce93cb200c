"""Detects layer calls that cannot be split by rows exactly.

Before the first split call of a layer, for each set of flags and kinds of inputs, the
layer is called on a few rows of the batch, unsplit and in two parts. Its outputs, added
losses and state updates must be what the data-parallel call makes of the parts.

Two batches are tried: the first rows of the batch, and repetitions of two rows, one in
each part. The second one makes a dependence on the full batch as large as possible: the
capacity of experts is exceeded, and the statistics of the parts differ most. For most
layers three calls suffice: on the first rows, on a part of these, and on repetitions of
the last row. Outputs of a row and values assigned to variables must be equal in all
three; batch normalization uses the statistics of the first call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from keras import ops

from keras_strategies.keras_compat.models.layers import compute_dtypes
from keras_strategies.runtime.row_checks.layer_probes import (
    DifferentRowsError,
    LayerCall,
    LayerProbes,
    Probe,
    ProbeOutcome,
    UsesReplicasError,
    as_array,
    first_rows,
    taken,
)
from keras_strategies.runtime.state.replica_state import has_rows, merged_value

if TYPE_CHECKING:
    from keras_strategies.runtime.workers import Workers

PROBE_ROWS = 32
# Repetitions of each of the two rows of the second batch.
_REPETITIONS = 4
# Random numbers are this quantile of their range: dropout drops nothing, then most.
_QUANTILES = (0.97, 0.03)
# Largest difference that is rounding, relative to the largest value.
_TOLERANCES = {"int8": 5e-2, "bfloat16": 5e-2, "float16": 1e-2, "float32": 1e-4}
_SMALLEST_SCALE = 1e-6
# Fraction of integers that may differ: rounding of floats can change an argmax or bin.
_TIES = 0.02


@dataclass(frozen=True)
class RowCheck:
    """Whether a layer call can be split by rows.

    Args:
        rows: int, how many rows were compared.
        problem: str, the obstacle; None if the split call is exact.
        loss_kinds: for each loss that the layer adds, whether it is a `"mean"` or a
            `"sum"` over rows.
    """

    rows: int
    problem: str | None = None
    loss_kinds: tuple[str, ...] = ()


class RowChecks:
    """Results of the checks of all layers that a strategy calls.

    Args:
        workers: the workers, which make the same calls; None without a cluster. A layer
            is split on all of them or on none: with rounding near the tolerance, only
            one worker might find a difference, and others would wait in collectives.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        self._workers = workers
        self._found: weakref.WeakKeyDictionary[Any, dict[Any, RowCheck]] = (
            weakref.WeakKeyDictionary()
        )

    def check(self, probes: LayerProbes, call: LayerCall) -> tuple[RowCheck, bool]:
        """Checks a call, unless an earlier result holds for it.

        Returns:
            The result, and whether it is new. A new problem is not stored yet: the
            caller adds it after the unsplit call, which raises errors of its arguments.
        """
        found = self._found.setdefault(call.layer, {})
        known = found.get(call.key())
        rows = min(PROBE_ROWS, _known_rows(probes, call))
        # A check on few rows is repeated for a batch of at least twice as many.
        if known is not None and (known.problem or rows < 2 * known.rows):
            return known, False
        result = self._agreed(call, _compare(probes, call, rows))
        if result.problem is None:
            self.add(call, result)
        return result, True

    def _agreed(self, call: LayerCall, own: RowCheck) -> RowCheck:
        """The result for all workers: a problem if any worker has found one."""
        if self._workers is None:
            return own
        every = self._workers.group.gather_values(
            f"the check of layer {call.layer.name!r}", [own.problem, own.loss_kinds]
        )
        for problem, _ in every:
            if problem is not None:
                return RowCheck(own.rows, problem)
        if any(tuple(kinds) != own.loss_kinds for _, kinds in every):
            return RowCheck(own.rows, "workers disagree on the kinds of its losses")
        return own

    def clear(self) -> None:
        """Drops all results: workers that have joined lack them."""
        self._found.clear()

    def add(self, call: LayerCall, result: RowCheck) -> None:
        self._found.setdefault(call.layer, {})[call.key()] = result


def _known_rows(probes: LayerProbes, call: LayerCall) -> int:
    if isinstance(call.rows, int):
        return call.rows
    for leaf in call.leaves:
        if has_rows(leaf, call.rows):
            values = probes.values_of(leaf)
            if values is not None:
                return int(values.shape[0])
    return PROBE_ROWS // 4


# The comparison.


def _compare(probes: LayerProbes, call: LayerCall, rows: int) -> RowCheck:
    tolerance = tolerance_of(call.layer)
    try:
        return _compared(probes, call, rows, tolerance)
    except UsesReplicasError:
        # A layer that calls collectives itself: the split call raises its errors.
        return RowCheck(rows)
    except DifferentRowsError as error:
        return RowCheck(rows, f"{error}, so it cannot be split")
    except Exception as error:
        # Any error on a subset of rows. If the arguments are wrong, the unsplit call
        # that follows raises the error again.
        reason = (str(error).strip() or "no message").splitlines()[0]
        return RowCheck(
            rows,
            f"it cannot be computed on a subset of its rows ({type(error).__name__}: "
            f"{reason[:200]})",
        )


def _compared(
    probes: LayerProbes, call: LayerCall, rows: int, tolerance: float
) -> RowCheck:
    kinds: list[set[str]] = []
    problem = None
    with probes.probing(_QUANTILES[0]) as randomness:
        first = first_rows(probes, call, rows)
        probe = Probe(probes, call, first)
        if not (
            _is_same_alone(probe, tolerance) and _is_same_in_part(probe, tolerance)
        ):
            problem = _problem_of(probes, call, first, tolerance, kinds, probe)
            if problem is None:
                half = _repetitions(probe)
                extreme = taken(first, [0] * half + [probe.rows // 2] * half)
                probe = Probe(probes, call, extreme)
                problem = _problem_of(probes, call, extreme, tolerance, kinds, probe)
        if problem is not None:
            return RowCheck(rows, problem)
    if randomness.drawn:
        with probes.probing(_QUANTILES[1]):
            probe = Probe(probes, call, first)
            if not _is_same_alone(probe, tolerance):
                problem = _problem_of(probes, call, first, tolerance, kinds, probe)
                if problem is not None:
                    return RowCheck(rows, problem)
    chosen = ("mean" if "mean" in found else "sum" for found in kinds)
    return RowCheck(rows, None, tuple(chosen))


def _repetitions(probe: Probe) -> int:
    return min(_REPETITIONS, (probe.rows + 1) // 2)


def _is_same_alone(probe: Probe, tolerance: float) -> bool:
    """Whether the last row has the same outputs in a batch of repetitions of it.

    This is the most extreme batch: one expert gets all rows, and statistics other than
    those of batch normalization are those of one row.
    """
    if not probe.compares_rows:
        return False
    count = 2 * _repetitions(probe)
    return _are_rows_of(
        probe.repeated(probe.rows - 1, count),
        probe,
        lambda output: np.repeat(output[-1:], count, axis=0),
        tolerance,
    )


def _is_same_in_part(probe: Probe, tolerance: float) -> bool:
    """Whether the first rows have the same outputs without the rows after them."""
    size = probe.sizes[0]
    return _are_rows_of(
        probe.first_part, probe, lambda output: output[:size], tolerance
    )


def _are_rows_of(
    found: ProbeOutcome,
    probe: Probe,
    rows: Callable[[Any], Any],
    tolerance: float,
) -> bool:
    """Whether a call's outputs are certain rows of the unsplit call's outputs.

    Also compares assigned variables, merged as if two replicas had made this call.
    """
    outputs = probe.unsplit.outputs
    if len(found.outputs) != len(outputs):
        return False
    for own, expected in zip(found.outputs, outputs, strict=True):
        if own is None or expected is None or expected.shape[:1] != (probe.rows,):
            return False
        if difference(rows(expected), own) > tolerance:
            return False
    updates = probe.unsplit.updates
    if found.updates.keys() != updates.keys():
        return False
    for key, (variable, value) in updates.items():
        own = found.updates[key][1]
        is_float = "float" in variable.dtype
        if not is_float and not np.array_equal(as_array(own), as_array(value)):
            return False
    return not any(_differing_updates(probe, [found, found], tolerance))


def _problem_of(
    probes: LayerProbes,
    call: LayerCall,
    batch: list[Any],
    tolerance: float,
    kinds: list[set[str]],
    probe: Probe,
) -> str | None:
    found = _loss_kinds(probe, tolerance)
    if not kinds:
        kinds += found
    elif len(kinds) == len(found):
        kinds[:] = [a & b for a, b in zip(kinds, found, strict=True)]
    else:
        return "the number of losses that it adds depends on the rows"
    if probe.collectives.by_user:
        # A layer that calls collectives itself.
        return None
    if any(len(part.losses) != len(probe.unsplit.losses) for part in probe.parts):
        return "the number of losses that it adds depends on the rows"
    what = [
        *_differing_outputs(probe, tolerance),
        *(f"the loss {i} that it adds" for i, kind in enumerate(kinds) if not kind),
        *_differing_updates(probe, probe.parts, tolerance),
    ]
    if not what:
        return None
    inner = _first_differing_layer(probes, call, batch, tolerance)
    where = "" if inner is None else f", first in {inner.name!r} ({_type(inner)})"
    return f"{what[0]} depends on the batch as a whole{where}"


def _differing_outputs(probe: Probe, tolerance: float) -> Iterator[str]:
    for i, unsplit in enumerate(probe.unsplit.outputs):
        parts = [part.outputs[i] for part in probe.parts]
        if unsplit is None or any(part is None for part in parts):
            continue
        sizes = [part.shape[:1] for part in parts]
        if unsplit.ndim == 0 or sizes != [(size,) for size in probe.sizes]:
            # Outputs without a batch axis, which the data-parallel call reports.
            continue
        gap = difference(unsplit, np.concatenate(parts))
        if gap > tolerance:
            yield f"its output {i} (by {gap:.2g} of the largest value)"


def _loss_kinds(probe: Probe, tolerance: float) -> list[set[str]]:
    """For each loss the kinds that agree with its values; empty if neither does."""
    kinds = []
    for i, unsplit in enumerate(probe.unsplit.losses):
        if any(i >= len(part.losses) for part in probe.parts):
            kinds.append({"mean"})
            continue
        parts = [part.losses[i] for part in probe.parts]
        shapes = [part.shape[:1] for part in parts]
        if unsplit.ndim > 0 and shapes == [(size,) for size in probe.sizes]:
            is_equal = difference(unsplit, np.concatenate(parts)) <= tolerance
            kinds.append({"mean", "sum"} if is_equal else set())
            continue
        means = [p * f for p, f in zip(parts, probe.fractions, strict=True)]
        candidates = {"mean": sum(means), "sum": sum(parts)}
        scale = max(float(np.max(np.abs(value), initial=0)) for value in parts)
        kinds.append(
            {
                kind
                for kind, value in candidates.items()
                if difference(unsplit, value, scale) <= tolerance
            }
        )
    return kinds


def _differing_updates(
    probe: Probe, parts: Sequence[ProbeOutcome], tolerance: float
) -> Iterator[str]:
    for key, (variable, value) in probe.unsplit.updates.items():
        values = [part.updates[key][1] for part in parts if key in part.updates]
        if not values:
            yield f"its update of {variable.path!r}"
            continue
        merged = as_array(merged_value(variable, values, probe.fractions))
        old = as_array(ops.convert_to_tensor(variable))
        unsplit = as_array(value)
        if unsplit.shape != old.shape or not np.issubdtype(old.dtype, np.floating):
            if difference(unsplit, merged) > tolerance:
                yield f"its update of {variable.path!r}"
            continue
        # Relative to the change, or to the value if it changes little.
        change = float(np.abs(unsplit - old).max(initial=0))
        scale = max(change, 1e-2 * float(np.abs(old).max(initial=0)))
        if difference(unsplit, merged, scale) > tolerance:
            yield f"its update of {variable.path!r}"


def _first_differing_layer(
    probes: LayerProbes, call: LayerCall, batch: list[Any], tolerance: float
) -> Any:
    """The first inner layer with other outputs; None if they cannot be compared."""
    probe = Probe(probes, call, batch, with_inner=True)
    calls = [outcome.inner for outcome in (probe.unsplit, *probe.parts)]
    wrong = [i for i, kind in enumerate(_loss_kinds(probe, tolerance)) if not kind]
    for unsplit, *parts in zip(*calls, strict=False):
        if any(part.layer is not unsplit.layer for part in parts):
            return None
        if wrong and unsplit.losses_so_far > wrong[0]:
            return unsplit.layer
        columns = zip(unsplit.outputs, *(part.outputs for part in parts), strict=False)
        for output, *own in columns:
            if output is None or output.ndim == 0 or any(p is None for p in own):
                continue
            if any(part.shape[1:] != output.shape[1:] for part in own):
                continue
            joined = np.concatenate(own)
            if joined.shape == output.shape and difference(output, joined) > tolerance:
                return unsplit.layer
    return None


def difference(expected: Any, found: Any, scale: float | None = None) -> float:
    """The largest difference between two arrays.

    Args:
        expected: array.
        found: array; infinity is returned if its shape is another.
        scale: float, divisor of differences; the largest value by default.

    Returns:
        float; for integers 1 if more than a few differ, else 0.
    """
    expected, found = np.asarray(expected), np.asarray(found)
    if expected.shape != found.shape:
        return float("inf")
    if expected.size == 0:
        return 0.0
    if not np.issubdtype(expected.dtype, np.floating):
        return float(np.mean(expected != found) > _TIES)
    same = (expected == found) | (np.isnan(expected) & np.isnan(found))
    gap = np.abs(np.where(same, 0, expected - np.where(same, expected, found))).max()
    if not np.isfinite(gap):
        return float("inf")
    if scale is None:
        scale = float(np.abs(expected[np.isfinite(expected)]).max(initial=0))
    return float(gap / max(scale, _SMALLEST_SCALE))


def tolerance_of(layer: Any) -> float:
    """Tolerance of a layer, from the lowest precision that it computes in."""
    dtypes = compute_dtypes(layer)
    return max(_TOLERANCES.get(dtype, _TOLERANCES["float32"]) for dtype in dtypes)


def _type(layer: Any) -> str:
    return type(layer).__name__
