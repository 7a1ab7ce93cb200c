"""Grouped convolutions in programs over a mesh: each device computes its own rows.

XLA in JAX 0.10 does not partition a convolution with `feature_group_count` by rows: it
gathers the activations on every device. With a sharded kernel it can fail a check of
its partitioner, which ends the process. Under `jax.shard_map` it has nothing to
partition: rows, padded if they do not divide, stay on their devices, and the kernel is
gathered.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras

from keras_strategies.engines.jax.padded_rows import pad_outputs
from keras_strategies.keras_compat.backends.keras_on_jax import hook_convolutions

_rows: contextvars.ContextVar[jax.NamedSharding | None]
_rows = contextvars.ContextVar("_rows", default=None)


@contextlib.contextmanager
def convolutions_by_rows(sharding: jax.NamedSharding | None) -> Iterator[None]:
    """Shards grouped convolutions of a trace by rows.

    Args:
        sharding: the sharding of rows; None leaves them to XLA.
    """
    if sharding is not None:
        hook_convolutions(_by_rows)
    token = _rows.set(sharding)
    try:
        yield
    finally:
        _rows.reset(token)


def rows_of_program() -> jax.NamedSharding | None:
    """The sharding of rows in the trace under way; None without one."""
    return _rows.get()


def _by_rows(convolve: Callable[..., Any], inputs: Any, kernel: Any) -> Any:
    """A grouped convolution.

    Args:
        convolve: Keras's function of inputs and kernel.
        inputs: array of shape `(rows, ...)`.
        kernel: array.
    """
    sharding = _rows.get()
    if (
        sharding is None
        or not isinstance(inputs, jax.core.Tracer)
        # Inside of a `shard_map` of the user's.
        or jax.sharding.get_abstract_mesh().manual_axes
    ):
        return convolve(inputs, kernel)
    padded = pad_outputs(inputs, sharding)
    by_rows = jax.shard_map(
        convolve,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, jax.P()),
        out_specs=sharding.spec,
    )
    found = by_rows(padded.array, keras.ops.convert_to_tensor(kernel))
    return jax.lax.with_sharding_constraint(found[: padded.rows], sharding)
