"""The last update of an epoch accumulates less, and is divided by as much.

Three rows, one at a time, accumulated in twos: the last window has one row, and its
loss is halved, as if a second were to come.

Framework: Transformers
Re-enacted: in torch
Reported: transformers, 2025-06
Link: https://github.com/huggingface/transformers/pull/38872
Published: a loss of 0.4992 in the last window, 0.9984 in all others
Number: the weight after an epoch of SGD
"""

import numpy as np
import torch

from museum.common import exhibit, our_epoch, torch_linear

X = np.array([[1.0], [2.0], [3.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0]], "float32")
ROWS = [(torch.tensor(x), torch.tensor(y)) for x, y in zip(X, Y, strict=True)]


def weight(last_window):
    model, optimizer = torch_linear()
    for window, size in [(ROWS[:2], 2), (ROWS[2:], last_window)]:
        optimizer.zero_grad()
        for x, y in window:
            (torch.nn.functional.mse_loss(model(x), y) / size).backward()
        optimizer.step()
    return model.weight.item()


exhibit(
    __doc__, lambda: weight(2), lambda: weight(1), lambda: our_epoch(X, Y, batch_size=2)
)
