"""A forward pass through `ddp.module` sums no gradients.

DDP arms its hooks in its own `forward`. A loop that calls the module inside, for
`generate` or an own loss, trains each process on its rows alone, and saves rank 0.

Framework: DDP
Reported: minimind's GRPO, PPO and agent trainers, 2026-09
Link: https://github.com/jingyaogong/minimind/issues/853
Number: the weight that rank 0 saves after a step of SGD
Upstream: A backward pass to parameters of a DDP module whose `forward` was not called
  leaves local gradients without a word. Please warn in the hook of the parameter.
"""

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, our_weight, torch_linear

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


def step(rank, count):
    model, optimizer = torch_linear(DDP)
    x, y = (torch.tensor(np.array_split(rows, count)[rank]) for rows in (X, Y))
    torch.nn.functional.mse_loss(model.module(x), y).backward()
    optimizer.step()
    return model.module.weight.item()


exhibit_ranks(__doc__, step, lambda: our_weight(X, Y))
