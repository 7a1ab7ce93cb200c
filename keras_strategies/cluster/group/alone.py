"""A worker without others, such as one that trains before it joins them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from keras_strategies.lead.client_state import (
    GroupListener,
    JoinedGeneration,
    Offered,
)
from keras_strategies.lead.state import Loss, Settings


@dataclass
class AloneClient:
    """As `LeadClient`, for a group of one worker.

    Args:
        index: int, its number in the cluster.
        host: str, its address.
        settings: those of the cluster.
    """

    index: int
    host: str
    settings: Settings
    progress: str = ""
    run_id: str = ""
    step: int | None = None
    end: tuple[str, Loss | None] | None = None
    listener: GroupListener = field(default_factory=GroupListener)
    times_of: dict[int, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.timeout, self.patience = self.settings.timeout, self.settings.patience
        place = (self.index,), (self.host,), (os.getpid(),)
        self.generation = JoinedGeneration(0, None, 0, *place, (), (), (), "")

    def offer(self, what: str, value: str, stream: str = "") -> Offered:
        return Offered((stream, 0), 0, {"value": value})

    def compared(
        self,
        offered: Offered,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> list[tuple[str, tuple[int, ...]]]:
        return [(offered.answer["value"], (0,))]

    def begin_step(self) -> bool:
        return True

    def _nothing(self, *args: Any, **options: Any) -> None:
        pass

    check = await_lease = request_stop = resume_steps = leave = _nothing
    saved = wait_saved = report_failure = _nothing

    def status(self) -> dict[str, Any]:
        return {"workers": []}
