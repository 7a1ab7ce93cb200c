"""Accumulated gradients are a mean of means over unequal numbers of tokens.

Two micro-batches, of two tokens and of six. Each loss is a mean over its tokens, and
the gradients are averaged: a token of the first counts three times as much.

Framework: Transformers
Re-enacted: in torch. `gradient_accumulation_steps` of Keras is this mean of means, too,
  on one device as under a strategy; ours has the tokens as a batch of two replicas
Reported: transformers, 2023-07; mended by transformers#34191, 2024-10
Link: https://github.com/huggingface/transformers/issues/24725
Number: the weight after a step of SGD
"""

import numpy as np
import torch

from museum.common import exhibit, our_weight, torch_linear

X = np.arange(1, 9, dtype="float32")[:, None] / 4
Y = np.array([[2.0], [0], [1], [9], [3], [8], [0], [5]], "float32")


def weight(micro_batches):
    model, optimizer = torch_linear()
    for rows in micro_batches:
        loss = torch.nn.functional.mse_loss(
            model(torch.tensor(X[rows])), torch.tensor(Y[rows])
        )
        (loss / len(micro_batches)).backward()
    optimizer.step()
    return model.weight.item()


ALL, FIRST, SECOND = slice(0, 8), slice(0, 2), slice(2, 8)
exhibit(
    __doc__,
    lambda: weight([FIRST, SECOND]),
    lambda: weight([ALL]),
    lambda: our_weight(X, Y),
)
