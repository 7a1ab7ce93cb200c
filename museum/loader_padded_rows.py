"""`DistributedSampler` repeats rows, and the accuracy counts them twice.

Five rows on two processes become six: the first row is read again. Here it is the one
that the model gets wrong.

Framework: data loaders
Reported: torch 1.2, 2019-08
Link: https://github.com/pytorch/pytorch/issues/25162
Number: the accuracy on five rows
Upstream: Please give `DistributedSampler` a mode for evaluation that neither repeats
  nor drops rows (the issue is open since 2019).
"""

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from museum.common import exhibit_ranks, our_metric, torch_linear

X = np.array([[2.0], [0.1], [0.2], [3.0], [4.0]], "float32")  # 1 where above 0.5
Y = np.array([[0.0], [0.0], [0.0], [1.0], [1.0]], "float32")
ROWS = TensorDataset(torch.tensor(X), torch.tensor(Y))


def step(rank, count):
    model, _ = torch_linear()
    sampler = DistributedSampler(ROWS, count, rank, shuffle=False)
    counts = torch.zeros(2)
    for x, y in DataLoader(ROWS, batch_size=1, sampler=sampler):
        counts += torch.tensor([((model(x) > 0.5) == y).sum(), len(x)])
    torch.distributed.all_reduce(counts)
    return (counts[0] / counts[1]).item()


exhibit_ranks(__doc__, step, lambda: our_metric(X, Y, "binary_accuracy", batch_size=2))
