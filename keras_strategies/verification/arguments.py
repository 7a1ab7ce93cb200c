"""Checks of the arguments of `ks.verify`."""

from __future__ import annotations

from typing import Any

from keras_strategies.communication.communicator import is_fixed
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.strategies.base.strategy import Strategy


def check_arguments(build: Any, strategy: Any, steps: Any, tolerance: Any) -> None:
    if not callable(build):
        raise InvalidArgumentError(
            "`build` of `verify` must be a function that makes and compiles the model, "
            f"because it is made several times. Received: {build!r}"
        )
    if not isinstance(strategy, Strategy):
        raise InvalidArgumentError(
            "`strategy` of `verify` must be a strategy, such as "
            f"`ks.MirroredStrategy()`. Received: {strategy!r}"
        )
    servers = strategy.drivers.servers
    if servers is not None and not servers.is_synchronous:
        raise InvalidArgumentError(
            "`verify` compares parameter servers whose steps run one after the other: "
            "others train with values that other workers have not updated yet. "
            f"Received: {strategy!r}. Pass `max_staleness=0` to the strategy."
        )
    check_int("steps", "verify", steps, 1)
    check_tolerance("verify", tolerance)


def check_int(name: str, owner: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgumentError(
            f"`{name}` of `{owner}` must be an int, {least} or more. Received: "
            f"{value!r}"
        )


def check_tolerance(owner: str, tolerance: Any) -> None:
    if tolerance is not None and not tolerance > 0:
        raise InvalidArgumentError(
            f"`tolerance` of `{owner}` must be above 0, or None. Received: "
            f"{tolerance!r}"
        )


def check_interruption(name: str, after: Any, steps: int, step: Any) -> None:
    """Raises ValueError unless `after` is None, or a step of `fit` before the last."""
    if after is None:
        return
    is_int = isinstance(after, int) and not isinstance(after, bool)
    if not is_int or not 1 <= after < steps or step is not None:
        raise InvalidArgumentError(
            f"`{name}` of `verify` must be a step of `fit` before the last one, "
            f"with `step=None`. Received: {after!r} of {steps} steps"
        )


def check_kill(kill_after: Any, resume_after: Any, strategy: Strategy) -> None:
    """Raises ValueError for an interruption that the strategy's workers do not have."""
    if kill_after is not None and resume_after is not None:
        raise InvalidArgumentError(
            "`verify` interrupts training once. Received: "
            f"{resume_after=}, {kill_after=}. Omit one of them."
        )
    workers = strategy.workers
    if kill_after is not None and workers is not None and is_fixed(workers):
        raise InvalidArgumentError(
            "`kill_after` of `verify` ends a worker, and the others continue if they "
            f"are elastic. Received: {strategy!r}. Pass `elastic=ks.Elastic()` to "
            "the strategy, or `resume_after` to `verify`."
        )
    if resume_after is not None and not is_fixed(workers):
        raise InvalidArgumentError(
            "`resume_after` of `verify` interrupts all workers together, and elastic "
            f"ones go on without one another. Received: {strategy!r}. Pass "
            "`kill_after`."
        )
