"""Batch normalization sees a process's rows, and the statistics of rank 0 are saved.

Each process normalizes its own rows. Before a forward pass DDP copies the moving
statistics of rank 0 to the others: the rows of all others are in none of them.

Framework: DDP
Reported: timm, 2020-03, with apex and DDP
Link: https://github.com/huggingface/pytorch-image-models/issues/110
Number: the moving mean after a batch of four rows
Upstream: A line in the documentation of DDP: moving statistics of BatchNorm are those
  of rank 0's rows; `SyncBatchNorm.convert_sync_batchnorm` has those of all rows.
"""

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, our_batch_norm

X = np.array([[1.0], [2.0], [10.0], [20.0]], "float32")


def step(rank, count):
    model = DDP(torch.nn.BatchNorm1d(1, momentum=0.1))
    model(torch.tensor(np.array_split(X, count)[rank])).mean().backward()
    return model.module.running_mean.item()


exhibit_ranks(__doc__, step, lambda: our_batch_norm(X)[0])
