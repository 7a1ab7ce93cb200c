"""A prepared loader trains on the first rows again, to fill the last batch.

Five rows in batches of two per process: the second step has one row, so the loader goes
back to the start of the data until both processes have two.

Framework: Accelerate
Reported: accelerate, 2024-01 (documented)
Link: https://github.com/huggingface/accelerate/issues/2316
Number: the weight after an epoch of SGD
Upstream: With `even_batches=True` rows at the start of the data weigh more in training.
  `accelerator.gather_for_metrics` knows of them; the loss does not. Please mask them.
"""

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from museum.common import exhibit_ranks, our_epoch, torch_linear

X = np.array([[0.1], [0.2], [0.3], [0.4], [2.0]], "float32")
Y = np.array([[9.0], [0.0], [1.0], [0.0], [8.0]], "float32")
ROWS = TensorDataset(torch.tensor(X), torch.tensor(Y))


def step(rank, count):
    loader = DataLoader(ROWS, batch_size=4 // count)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*torch_linear(), loader)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
    return accelerator.unwrap_model(model).weight.item()


exhibit_ranks(__doc__, step, lambda: our_epoch(DataLoader(ROWS, 4)))
