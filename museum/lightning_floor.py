"""Logged means are too large where ranks have unequal numbers of rows.

`self.log(sync_dist=True)` averages a sum over ranks, and the number of rows, an
integer, too. Five rows on two ranks are a mean of 2.5, which is stored as 2.

Framework: Lightning
Re-enacted: in torch.distributed
Reported: lightning 2.6 and 2.7, 2026-07; open
Link: https://github.com/Lightning-AI/pytorch-lightning/issues/21859
Number: the mean loss of five rows
Upstream: `_ResultMetric.cumulated_batch_size` is an int64, and `reduce(..., "mean")`
  truncates it. Please reduce it with `sum`, as the value, or keep it as a float.
"""

import numpy as np
import torch

from museum.common import exhibit_ranks, our_metric, torch_linear

X = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0], [8.0]], "float32")


def step(rank, count):
    model, _ = torch_linear()
    x, y = (torch.tensor(np.array_split(rows, count)[rank]) for rows in (X, Y))
    value = torch.nn.functional.mse_loss(model(x), y).detach() * len(x)
    cumulated_batch_size = torch.tensor(len(x))
    for each in (value, cumulated_batch_size):  # reduce(each, "mean") on gloo
        torch.distributed.all_reduce(each)
        each.copy_(each / count)
    return (value / cumulated_batch_size).item()


exhibit_ranks(__doc__, step, lambda: our_metric(X, Y))
