"""`DistributedSampler` gives every epoch the same order.

Without a call of `set_epoch`, its shuffle begins with the same seed in each epoch. The
`DataLoader` of one device shuffles anew.

Framework: data loaders
Reported: torch, 2020-01
Link: https://github.com/pytorch/pytorch/issues/31771
Number: how many different orders three epochs have
Upstream: `DistributedSampler(shuffle=True)` could count its own iterations, as its
  users expect, and keep `set_epoch` for resuming.
"""

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from museum.common import exhibit_ranks, two_replicas

ROWS = TensorDataset(torch.arange(16))


def step(rank, count):
    sampler = DistributedSampler(ROWS, count, rank) if count > 1 else None
    loader = DataLoader(ROWS, batch_size=4, sampler=sampler, shuffle=count == 1)
    return len({str([x for (x,) in loader]) for _ in range(3)})


def ours():
    loader = DataLoader(ROWS, batch_size=4, shuffle=True)
    data = two_replicas().experimental_distribute_dataset(loader)
    return len({str([x for (x,) in data]) for _ in range(3)})


exhibit_ranks(__doc__, step, ours)
