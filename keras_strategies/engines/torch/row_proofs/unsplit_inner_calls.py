"""Calls in a recorded call that cannot be split by rows either, by their operations.

Where a call is unsplit, the layers that it calls get all rows. Their operations are in
the recordings of the call, so those that mix rows need no recordings of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from keras_strategies.engines.torch.row_proofs.call_recording import (
    CallRecording,
    RecordedCall,
)
from keras_strategies.engines.torch.row_proofs.propagation import (
    Propagation,
    RecordingsDiffer,
)
from keras_strategies.engines.torch.row_proofs.value_placements import SAME, Placed
from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.runtime.row_proofs.layer_calls import UnsplitCall
from keras_strategies.runtime.row_proofs.row_placements import RowKind

_ROWS = Placed(RowKind.ROWS)


def unsplit_inner_calls(recordings: Sequence[CallRecording]) -> list[UnsplitCall]:
    """The calls of layers with layers in them whose results mix rows.

    Args:
        recordings: the recordings of a call that cannot be split.
    """
    found = []
    for calls in zip(*(recording.inner for recording in recordings), strict=False):
        if len(sublayers(calls[0].call.layer)) > 1 and _are_one(calls):
            problem = _problem(recordings, calls)
            if problem:
                first = calls[0]
                found.append(UnsplitCall(first.call, first.with_rows, problem))
    return found


def _are_one(calls: Sequence[RecordedCall]) -> bool:
    """Whether calls of all recordings are the same call."""
    first = calls[0]
    return all(
        call.call.layer is first.call.layer
        and (call.begin, call.end) == (first.begin, first.end)
        and call.with_rows == first.with_rows
        for call in calls[1:]
    )


def _problem(recordings: Sequence[CallRecording], calls: Sequence[RecordedCall]) -> str:
    """Why the results of a call mix rows; empty if they do not, or cannot be said to.

    Its arguments have all rows or none, as where the call around it is unsplit.
    """
    counts = [recording.rows for recording in recordings]
    recorders = [recording.recorder for recording in recordings]
    first = calls[0]
    propagation = Propagation(counts, recorders, first.begin)
    for _, version, is_rows in recordings[0].inputs:
        propagation.place(version, _ROWS if is_rows else SAME)
    for column in (_columns(calls, "leaves"), _columns(calls, "masks")):
        for versions, is_rows in zip(column, first.with_rows, strict=True):
            if None not in versions:
                propagation.place_of_all(versions, _ROWS if is_rows else SAME)
    try:
        propagation.advance(first.end)
        for versions in _columns(calls, "results"):
            placed = propagation.placed(versions).joined()
            if not placed.is_joined:
                return placed.reason
    except RecordingsDiffer:
        # Such as a tensor that is no argument.
        return ""
    return ""


def _columns(calls: Sequence[RecordedCall], name: str) -> Iterator[tuple[Any, ...]]:
    """Values of the calls in all recordings."""
    return zip(*(getattr(call, name) for call in calls), strict=False)
