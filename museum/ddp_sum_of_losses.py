"""DDP divides the gradient of a sum of losses by the number of processes.

With `reduction="sum"` the gradient of a batch is the sum over its rows. DDP averages
over processes, so training depends on how many there are.

Framework: DDP
Reported: torch, 2020-04
Link: https://github.com/pytorch/pytorch/issues/37359
Number: the weight after a step of SGD
Upstream: With a summed loss DDP returns the gradient of one device divided by the world
  size. Please accept `op=SUM` for the gradients, as communication hooks already can.
"""

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, our_weight, torch_linear

X = np.array([[1.0], [0.5], [0.2], [0.1]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


def step(rank, count):
    model, optimizer = torch_linear(DDP)
    x, y = (torch.tensor(np.array_split(rows, count)[rank]) for rows in (X, Y))
    torch.nn.functional.mse_loss(model(x), y, reduction="sum").backward()
    optimizer.step()
    return model.module.weight.item()


exhibit_ranks(
    __doc__,
    step,
    lambda: our_weight(X, Y, keras.losses.MeanSquaredError(reduction="sum")),
)
