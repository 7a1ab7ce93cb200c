"""The checkpoint is chosen by the score of rank 0.

`validation_epoch_end` runs in each process, on its rows. What it returns to choose a
checkpoint by is not reduced: the score that is saved is that of one process.

Framework: Lightning
Re-enacted: in torch.distributed
Reported: lightning, 2020-08
Link: https://github.com/Lightning-AI/pytorch-lightning/issues/3225
Number: the mean squared error of four rows
"""

import numpy as np
import torch

from museum.common import exhibit_ranks, our_metric, torch_linear

X = np.array([[1.0], [2.0], [3.0], [4.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0]], "float32")


def step(rank, count):
    model, _ = torch_linear()
    x, y = (torch.tensor(np.array_split(rows, count)[rank]) for rows in (X, Y))
    with torch.no_grad():
        return torch.nn.functional.mse_loss(model(x), y).item()


exhibit_ranks(__doc__, step, lambda: our_metric(X, Y))
