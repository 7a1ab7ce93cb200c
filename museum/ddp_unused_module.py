"""With a module that the forward pass skips, DDP does not sum the gradients of others.

Parameters share a bucket. One without a gradient keeps the bucket open, so the bucket
is not reduced in the first step; the next forward pass raises. A script that takes one
step, or steps on what `backward` left, has local gradients.

Framework: DDP
Reported: torch, 2023-10
Link: https://github.com/pytorch/pytorch/issues/112152
Number: the weight of rank 0 after a step of SGD
Upstream: With `find_unused_parameters=False` and an unused parameter, the optimizer can
  step on gradients that were never reduced. The error comes one forward pass too late.
"""

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, our_weight, torch_linear

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


def step(rank, count):
    used, optimizer = torch_linear()
    used.skipped = torch.nn.Linear(1, 1)  # no forward pass calls it
    x, y = (torch.tensor(np.array_split(rows, count)[rank]) for rows in (X, Y))
    torch.nn.functional.mse_loss(DDP(used)(x), y).backward()
    optimizer.step()
    return used.weight.item()


exhibit_ranks(__doc__, step, lambda: our_weight(X, Y))
