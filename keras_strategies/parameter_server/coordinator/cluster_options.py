"""Options of a cluster of parameter servers."""

from __future__ import annotations

from dataclasses import dataclass

from keras_strategies.errors import InvalidArgumentError


@dataclass(frozen=True)
class ClusterOptions:
    """Options of a cluster; see `ParameterServerStrategy`.

    Raises:
        ValueError: for an invalid option.
    """

    workers: int = 2
    servers: int = 1
    max_staleness: int | None = None
    pull_ahead: bool = False
    snapshot_seconds: float | None = None
    snapshot_folder: str | None = None
    on_snapshot_error: str = "raise"
    timeout_seconds: float = 120.0
    silence_seconds: float = 30.0
    start_seconds: float = 180.0
    step_timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        bound = self.max_staleness
        if bound is not None and (
            isinstance(bound, bool) or not isinstance(bound, int) or bound < 0
        ):
            raise InvalidArgumentError(
                "`max_staleness` must be an int of 0 or more, or None for no bound. "
                f"Received: {bound!r}"
            )
        for name, value in vars(self).items():
            is_time = name.endswith("_seconds") and value is not None
            if is_time and not value > 0:
                raise InvalidArgumentError(
                    f"`{name}` must be a positive number of seconds. Received: "
                    f"{value!r}"
                )
        if self.on_snapshot_error not in ("raise", "continue"):
            raise InvalidArgumentError(
                "`on_snapshot_error` must be 'raise' or 'continue'. Received: "
                f"{self.on_snapshot_error!r}"
            )
