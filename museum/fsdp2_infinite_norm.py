"""Clipping by the largest gradient takes the norm to be 1, always.

The norm over shards is the sum of powers, and then its root. For the infinite norm the
root is `total ** (1 / inf)`, which is 1 for any gradient.

Framework: FSDP2
Re-enacted: in torch.distributed, the formula of torchrec
Reported: torchrec, 2025-07
Link: https://github.com/meta-pytorch/torchrec/pull/3199
Number: the largest gradient
"""

import numpy as np
import torch

from museum.common import exhibit_ranks, our_weight

GRADIENTS = np.array([3.0, -7.0, 2.0, 5.0], "float32")
ROWS = np.stack([GRADIENTS, GRADIENTS])


def loss_with_these_gradients(y, outputs):
    return 4 * y * outputs


def step(rank, count):
    total = torch.tensor(np.abs(np.array_split(GRADIENTS, count)[rank]).max())
    torch.distributed.all_reduce(total, torch.distributed.ReduceOp.MAX)
    return (total ** (1.0 / torch.inf) if count > 1 else total).item()


exhibit_ranks(
    __doc__,
    step,
    lambda: (
        abs(our_weight(np.ones((2, 1)), ROWS, loss_with_these_gradients) - 1).max()
        / 0.1
    ),
)
