"""The request and the reply of one step between a worker and a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

#: A part's name: the variable's number, and the first of the rows.
Key = tuple[int, int]


#: An update's name: the closure's number, and the number of the update in it.
UpdateId = tuple[int, int]


@dataclass(frozen=True)
class ScaleReport:
    """What a worker found of a step, for the server that keeps the scale.

    Args:
        scale: the key of `dynamic_scale`.
        counter: the key of `step_counter`.
        growth_steps: int, steps with finite gradients after which the scale doubles.
        used: float32, the scale that the gradients were computed with.
        is_finite: bool, whether all of them were finite.
    """

    scale: Key
    counter: Key
    growth_steps: int
    used: np.ndarray
    is_finite: bool


@dataclass(frozen=True)
class StepRequest:
    """The one message of a step: what to push, and what to pull.

    Args:
        update: the name of the update, None if there is nothing to push.
        done: int, closures below this number need not be remembered.
        optimizer: int, whose gradients these are; None without any.
        dense: pairs of a part and its gradient.
        rows: triples of a part, rows and their gradients.
        adds: pairs of a part and what to add to it.
        scales: what was found of losses that were scaled.
        pull: parts to send whole.
        pull_rows: triples of a part, rows to send, and how many rows the reply is to
            have, with zeros below those.
    """

    update: UpdateId | None = None
    done: int = 0
    optimizers: tuple[tuple[int, list[Any], list[Any]], ...] = ()
    adds: tuple[tuple[Key, np.ndarray], ...] = ()
    writes: tuple[tuple[Key, np.ndarray], ...] = ()
    scales: tuple[ScaleReport, ...] = ()
    pull: tuple[Key, ...] = ()
    pull_rows: tuple[tuple[Key, np.ndarray, int], ...] = ()


@dataclass(frozen=True)
class StepReply:
    """What a server sends back.

    Args:
        dense: parts.
        rows: rows of parts.
        version: int, the updates that are in these values.
    """

    dense: list[np.ndarray]
    rows: list[np.ndarray]
    version: int
