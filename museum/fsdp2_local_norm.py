"""The norm that `clip_grad_norm_` returns under FSDP2 is that of a shard.

It was a DTensor whose sum over processes was still to come. Its value on a process, as
loops log it, is too small, by about the square root of the number of shards.

Framework: FSDP2
Reported: torch 2.9.1, 2025-12; logged so by miles_diffusion until 2026-07
  (https://github.com/radixark/miles_diffusion/pull/35)
Link: https://github.com/pytorch/pytorch/issues/170862
Number: the norm of the gradients
"""

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from museum.common import exhibit_ranks, our_weight

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")


def step(rank, count):
    model = torch.nn.Linear(1, 4, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
    model(torch.tensor(np.array_split(X, count)[rank])).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return norm.to_local().item()


exhibit_ranks(
    __doc__, step, lambda: np.linalg.norm(1 - our_weight(X, np.zeros((4, 4)))) / 0.1
)
