"""DDP overwrites the state of a metric that is in buffers with that of rank 0.

A metric as a submodule has its sums in buffers. Before each forward pass DDP copies the
buffers of rank 0 to all: what the others have counted is lost, rank 0 counts twice.

Framework: DDP
Reported: Lightning, 2020-10, mended there by sums outside of buffers
Link: https://github.com/Lightning-AI/pytorch-lightning/issues/3728
Number: the mean squared error of eight rows in two batches
Upstream: `broadcast_buffers=True` erases sums that ranks keep in buffers. Please let a
  module name buffers that are local.
"""

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, our_metric, torch_linear

X = np.arange(8, dtype="float32")[:, None]
Y = np.array([[2.0], [0], [1], [9], [3], [8], [0], [5]], "float32")


def step(rank, count):
    module, _ = torch_linear()
    module.register_buffer("errors", torch.zeros(()))
    model = DDP(module)
    for batch in range(2):
        rows = np.array_split(np.arange(8)[batch * 4 :][:4], count)[rank]
        difference = model(torch.tensor(X[rows])) - torch.tensor(Y[rows])
        module.errors += (difference.detach() ** 2).sum()
    torch.distributed.all_reduce(module.errors)
    return module.errors.item() / len(X)


exhibit_ranks(__doc__, step, lambda: our_metric(X, Y, batch_size=4))
