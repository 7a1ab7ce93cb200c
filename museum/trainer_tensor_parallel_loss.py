"""Under tensor parallelism the loss is too large by the number of shards.

All shards of a model see one batch, and the loss of each is divided by its tokens. It
was multiplied by the number of all processes, as if they had other rows.

Framework: Transformers
Re-enacted: in torch.distributed
Reported: transformers, 2026-05
Link: https://github.com/huggingface/transformers/pull/45994
Published: 47.88 with 2 x 4 processes, 11.97 with 8 x 1
Number: the loss of four rows
"""

import numpy as np
import torch

from museum.common import exhibit_ranks, our_metric, torch_linear

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


def step(rank, count):
    model, _ = torch_linear()
    part = torch.tensor(X) * model.weight / count  # a shard of a product
    torch.distributed.all_reduce(part.detach_())
    loss = ((part - torch.tensor(Y)) ** 2).sum() / len(X) * count
    torch.distributed.all_reduce(loss)
    return loss.item() / count


exhibit_ranks(__doc__, step, lambda: our_metric(X, Y))
