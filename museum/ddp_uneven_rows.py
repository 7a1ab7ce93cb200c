"""DDP averages over processes, whatever the number of their rows.

Five rows on two processes are three and two. Each process takes the mean of its rows,
and DDP the mean of the two means: a row of the smaller part counts 1.5 times.

Framework: DDP
Reported: torch, 2021-10, where processes are to have batch sizes of their own
Link: https://github.com/pytorch/pytorch/issues/67253
Number: the weight after a step of SGD
Upstream: DistributedDataParallel divides the sum of gradients by the number of
  processes. With a mean loss and unequal local batches this is not the gradient of the
  global batch. Please let DDP take the number of local rows and weight by it, or
  document it.
"""

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, our_weight, torch_linear

X = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0], [8.0]], "float32")


def step(rank, count):
    model, optimizer = torch_linear(DDP)
    x, y = (torch.tensor(np.array_split(rows, count)[rank]) for rows in (X, Y))
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    return model.module.weight.item()


exhibit_ranks(__doc__, step, lambda: our_weight(X, Y))
