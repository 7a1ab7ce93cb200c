"""Gradients of single rows are summed over devices in `shard_map`.

Weights that a mapped function closes over are replicated. Their gradient is a sum over
devices by the rules of `shard_map`, also where a gradient for each row was asked for.

Framework: JAX
Reported: jax, 2026-04; open
Link: https://github.com/jax-ml/jax/issues/36886
Number: the gradient of the first of four rows
Upstream: `shard_map` sums gradients of closed-over arrays; its page could say so.
"""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from museum.common import exhibit_devices, two_replicas

ROWS = np.array([1.0, 2.0, 30.0, 40.0], "float32")


def gradients(rows):
    return jax.vmap(lambda row: jax.grad(lambda w: w * row)(3.0))(rows)


def step(devices):
    mesh, rows = jax.sharding.Mesh(devices, ("rows",)), P("rows")
    return jax.shard_map(gradients, mesh=mesh, in_specs=rows, out_specs=rows)(ROWS)


def ours():
    strategy = two_replicas()
    (rows,) = strategy.experimental_distribute_dataset(ROWS, batch_size=4)
    found = strategy.run(gradients, args=(rows,))
    return strategy.experimental_local_results(found)[0][0]


exhibit_devices(__doc__, step, ours)
