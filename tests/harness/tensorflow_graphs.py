"""Whether TensorFlow optimizes the graphs of programs before it runs them.

That takes an eighth of the time of its tests, in which graphs run for milliseconds. In
`make test` graphs run as they were traced, except for cases of each mechanism with
which the library builds graphs (`Case.optimized_graphs`). At night all are optimized,
as for users.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf


def set_optimized(is_optimized: bool) -> None:
    options = {"disable_meta_optimizer": not is_optimized}
    tf.config.optimizer.set_experimental_options(options)


@contextlib.contextmanager
def optimized() -> Iterator[None]:
    """Graphs of programs that this thread calls are optimized."""
    before = tf.config.optimizer.get_experimental_options()
    was_optimized = not before.get("disable_meta_optimizer", False)
    set_optimized(True)
    try:
        yield
    finally:
        set_optimized(was_optimized)
