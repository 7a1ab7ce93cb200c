"""DDP averages weighted means without their weights.

Rows have weights (a class, a mask of padding, an ignored pixel), and the loss is the
sum of the weighted losses over the sum of the weights. Each process divides by the
weights of its own rows: here a lone row counts as much as two rows elsewhere.

Framework: DDP
Reported: torch, 2019-12, for the ignored pixels of segmentation
Link: https://github.com/pytorch/pytorch/issues/31579
Number: the weight after a step of SGD
Upstream: Losses with `ignore_index` or class weights divide by local weights, and DDP
  averages the gradients as if these were equal. Please let a process have a weight.
"""

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, our_weight, torch_linear

X, Y = np.array([[1.0], [2.0], [3.0], [4.0]]), np.array([[2.0], [0.0], [1.0], [9.0]])
WEIGHTS = np.array([[1.0], [1.0], [0.0], [1.0]])
LOSS = keras.losses.MeanSquaredError("mean_with_sample_weight")


def step(rank, count):
    model, optimizer = torch_linear(DDP)
    parts = [np.array_split(rows, count)[rank] for rows in (X, Y, WEIGHTS)]
    x, y, weights = (torch.tensor(part, dtype=torch.float32) for part in parts)
    ((model(x) - y) ** 2 * weights).sum().div(weights.sum()).backward()
    optimizer.step()
    return model.module.weight.item()


exhibit_ranks(
    __doc__, step, lambda: our_weight(X, Y, LOSS, sample_weight=WEIGHTS[:, 0])
)
