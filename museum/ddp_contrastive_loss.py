"""The gradient of a contrastive loss is too small by the number of processes.

Each process gathers all embeddings, keeps the gradients of its own, and computes the
loss of the global batch. These parts of a gradient are to be summed; DDP averages.

Framework: DDP
Re-enacted: in DDP, as ms-swift did
Reported: ms-swift, 2026-09
Link: https://github.com/modelscope/ms-swift/pull/10081
Published: gradients of 0.5 with two processes, 1.0 with one
Number: the weight after a step of SGD
"""

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, our_weight, torch_linear

X = np.array([[0.2], [0.9], [-0.7], [0.4]], "float32")


def step(rank, count):
    model, optimizer = torch_linear(DDP)
    own = model(torch.tensor(np.array_split(X, count)[rank]))
    y = torch.empty(4, 1)
    torch.distributed.all_gather_into_tensor(y, own.detach())
    y = torch.cat([y[: 2 * rank], own, y[2 * rank + len(own) :]])  # own gradients only
    torch.nn.functional.cross_entropy(y @ y.T, torch.arange(len(y))).backward()
    optimizer.step()
    return model.module.weight.item()


def info_nce(_, y):
    labels, logits = keras.ops.arange(4), keras.ops.matmul(y, keras.ops.transpose(y))
    return keras.losses.sparse_categorical_crossentropy(labels, logits, True)


exhibit_ranks(__doc__, step, lambda: our_weight(X, X, info_nce))
