"""Replicas of FSDP2 begin with different weights, and keep them.

DDP and FSDP1 could copy the weights of rank 0. `fully_shard` does not: without one seed
on all ranks the groups of HSDP train different models with the same gradients.

Framework: FSDP2
Reported: OLMo-core, 2025-07 (https://github.com/allenai/OLMo-core/pull/319)
Link: https://github.com/pytorch/torchtitan/issues/1777
Number: the loss of all rows, of which each replica has its own
Upstream: `fully_shard` could compare a checksum over the replicating axis of the mesh.
"""

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from museum.common import exhibit_ranks, linear, two_replicas

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


def step(rank, count):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1 - rank)  # as if each had drawn its own
    names = ("replicas", "shards")
    fully_shard(model, mesh=init_device_mesh("cpu", (count, 1), mesh_dim_names=names))
    x, y = (torch.tensor(np.array_split(rows, count)[rank]) for rows in (X, Y))
    loss = torch.nn.functional.mse_loss(model(x), y).detach()
    torch.distributed.all_reduce(loss)
    return loss.item() / count


def ours():
    with two_replicas().scope():
        return linear(loss="mse").evaluate(X, Y, verbose=0)


exhibit_ranks(__doc__, step, ours)
