"""Calls of programs whose new state is recorded, whatever interrupts them.

A compiled step donates its state: new values overwrite the old arrays. Keras empties
the variables while a loop runs. An exception between the two, bad data or Ctrl-C, would
leave a model without weights. So the state is recorded before a step reads its batch,
and again when it returns, with no bytecode in between at which Python could raise a
KeyboardInterrupt. One that is raised while the state is recorded has it recorded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def call_recorded(
    program: Callable[..., Any], args: Sequence[Any], record: Callable[[Any], None]
) -> Any:
    """The results of a program, recorded as soon as they exist.

    Args:
        program: a compiled program.
        args: its arguments, one or more.
        record: callable of the results.
    """
    results: list[Any] = []
    try:
        # `extend` and `map` run in C, and so does a compiled program: an interrupt is
        # raised before the call or when its result is in the list.
        results.extend(map(program, *([each] for each in args)))
    finally:
        if results:
            try:
                record(results[0])
            except KeyboardInterrupt:
                record(results[0])
                raise
    return results[0]
