"""TensorFlow's global random numbers, to make workers draw the same."""

from __future__ import annotations

import json
import secrets

import tensorflow as tf
from tensorflow.python.eager import context as eager_context


def random_state() -> bytes:
    """Where the random numbers are: the seed, and what came of it so far.

    Without a seed TensorFlow's numbers cannot be repeated, so that one is drawn.
    """
    context = eager_context.context()
    seed = eager_context.global_seed()
    if seed is None:
        # Not from Python's numbers, which would go on differently.
        tf.random.set_seed(secrets.randbits(31))
        seed = eager_context.global_seed()
    version, internal, gauss = context._rng.getstate()
    return json.dumps([int(seed), version, list(internal), gauss]).encode()


def set_random_state(state: bytes) -> None:
    """Goes on where another worker is.

    Args:
        state: bytes, its `random_state()`.
    """
    seed, version, internal, gauss = json.loads(state)
    context = eager_context.context()
    if eager_context.global_seed() != seed:
        tf.random.set_seed(seed)
    context._rng.setstate((version, tuple(internal), gauss))
