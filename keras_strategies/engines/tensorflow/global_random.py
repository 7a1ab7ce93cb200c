"""TensorFlow's global random numbers, to make workers draw the same."""

from __future__ import annotations

import json
import secrets

import tensorflow as tf

from keras_strategies.engines.tensorflow import compat


def random_state() -> bytes:
    """The state of the random numbers: the seed, and the numbers drawn so far.

    Without a seed TensorFlow's numbers cannot be repeated, so that one is drawn.
    """
    seed = compat.global_seed()
    if seed is None:
        # Not from Python's numbers, which would go on differently.
        tf.random.set_seed(secrets.randbits(31))
        seed = compat.global_seed()
    assert seed is not None
    version, internal, gauss = compat.operation_seeds().getstate()
    return json.dumps([int(seed), version, list(internal), gauss]).encode()


def set_random_state(state: bytes) -> None:
    """Goes on where another worker is.

    Args:
        state: bytes, its `random_state()`.
    """
    seed, version, internal, gauss = json.loads(state)
    if compat.global_seed() != seed:
        tf.random.set_seed(seed)
    compat.operation_seeds().setstate((version, tuple(internal), gauss))
