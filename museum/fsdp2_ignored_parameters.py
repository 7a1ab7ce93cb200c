"""Parameters that FSDP ignores have the gradients of a process.

What is named in `ignored_params` stays whole on each process. Its gradients are summed
over none, so the copies drift apart, and rank 0's is saved.

Framework: FSDP2
Reported: FSDP1, 2023-04; open
Link: https://github.com/pytorch/pytorch/issues/98281
Number: the weight of rank 0 after a step of SGD
Upstream: `ignored_params` are left out of the reduction as well as of sharding. Please
  reduce their gradients by default, or refuse those that require gradients.
"""

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from museum.common import exhibit_ranks, our_weight, torch_linear

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


def step(rank, count):
    model, optimizer = torch_linear()
    mesh = init_device_mesh("cpu", (count,))
    fully_shard(model, mesh=mesh, ignored_params={model.weight})
    x, y = (torch.tensor(np.array_split(rows, count)[rank]) for rows in (X, Y))
    torch.nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    return model.weight.item()


exhibit_ranks(__doc__, step, lambda: our_weight(X, Y))
