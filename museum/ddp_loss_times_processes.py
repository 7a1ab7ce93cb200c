"""A loss that is multiplied by the number of processes, to undo a mean of DDP.

The mean loss of a process needs no correction: DDP averages means. Multiplied by the
world size, its gradients are too large by the number of processes.

Framework: DDP
Re-enacted: in DDP, as the library did
Reported: sparseml, 2021-04
Link: https://github.com/neuralmagic/sparseml/pull/135
Number: the weight after a step of SGD
"""

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, our_weight, torch_linear

X = np.array([[1.0], [0.5], [0.2], [0.1]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


def step(rank, count):
    model, optimizer = torch_linear(DDP)
    x, y = (torch.tensor(np.array_split(rows, count)[rank]) for rows in (X, Y))
    loss = torch.nn.functional.mse_loss(model(x), y)
    (loss * count).backward()
    optimizer.step()
    return model.module.weight.item()


exhibit_ranks(__doc__, step, lambda: our_weight(X, Y))
