"""State of TensorFlow's global random numbers, to copy it between workers."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator

import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.operations import (
    global_seed,
    operation_seeds,
)


def random_state() -> bytes:
    """The global seed, and the state of the generator of operation seeds.

    Without a global seed TensorFlow's numbers cannot be reproduced, so one is set.
    """
    seed = global_seed()
    if seed is None:
        # Not from Python's generator: its state must not change.
        tf.random.set_seed(secrets.randbits(31))
        seed = global_seed()
    assert seed is not None
    version, internal, gauss = operation_seeds().getstate()
    return json.dumps([int(seed), version, list(internal), gauss]).encode()


def set_random_state(state: bytes) -> None:
    """Continues with the random numbers of another worker.

    Args:
        state: bytes, the `random_state()` of that worker.
    """
    seed, version, internal, gauss = json.loads(state)
    if global_seed() != seed:
        tf.random.set_seed(seed)
    operation_seeds().setstate((version, tuple(internal), gauss))


@contextlib.contextmanager
def operation_seeds_restored() -> Iterator[None]:
    """Restores the seeds of operations, so that a trace does not change later ones."""
    if global_seed() is None:
        yield
        return
    seeds = operation_seeds()
    before = seeds.getstate()
    try:
        yield
    finally:
        seeds.setstate(before)
