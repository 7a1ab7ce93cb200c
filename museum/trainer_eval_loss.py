"""The loss of an evaluation is multiplied by the number of processes.

In training the loss is divided by the tokens of all processes, so it is multiplied by
their number before DDP averages. In evaluation it is a plain mean, and multiplied, too.

Framework: Transformers
Re-enacted: in torch.distributed
Reported: transformers 4.46, 2024-12
Link: https://github.com/huggingface/transformers/issues/35078
Published: 8.01 times the loss of one GPU on 8 GPUs, transformers 5.3, 2026-08
  (https://github.com/Liquid4All/liquid-finetune/pull/38)
Number: the loss of four rows
"""

import numpy as np
import torch

from museum.common import exhibit_ranks, our_metric, torch_linear

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


def step(rank, count):
    model, _ = torch_linear()
    x, y = (torch.tensor(np.array_split(rows, count)[rank]) for rows in (X, Y))
    loss = torch.nn.functional.mse_loss(model(x), y).detach() * count
    torch.distributed.all_reduce(loss)  # the gathered losses, whose mean is logged
    return loss.item() / count


exhibit_ranks(__doc__, step, lambda: our_metric(X, Y))
