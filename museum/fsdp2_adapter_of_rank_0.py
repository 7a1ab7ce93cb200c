"""A saved adapter has the shard of rank 0 only.

A full state dict of an adapter was written from rank 0's local tensors. When it is
loaded, the other shards keep their first values: of two ranks, half of the training.

Framework: FSDP2
Re-enacted: in FSDP2, without peft
Reported: accelerate, 2026-09
Link: https://github.com/huggingface/accelerate/pull/4206
Published: 0.00 instead of 0.04 and 0.02 on rank 1 after loading
Number: the sum of the changes of four weights in what is saved
"""

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from museum.common import exhibit_ranks, our_weight

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")


def sum_of_outputs(_, outputs):
    return 4 * outputs


def step(rank, count):
    model = torch.nn.Linear(1, 4, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
    model(torch.tensor(np.array_split(X, count)[rank])).sum(1).mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return (model.weight.to_local() - 1).sum().item()  # what rank 0 writes


exhibit_ranks(
    __doc__, step, lambda: (our_weight(X, np.zeros((4, 4)), sum_of_outputs) - 1).sum()
)
