"""The loss is divided by the tokens of a process, then averaged over processes.

Four sequences with 3, 1, 1 and 1 tokens of three. After accumulation was mended, the
number of tokens was still that of a process: four here, two there.

Framework: Transformers
Re-enacted: in DDP
Reported: transformers, 2024-10; mended by `average_tokens_across_devices`
Link: https://github.com/huggingface/transformers/issues/34242
Number: the weight after a step of SGD
"""

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, our_weight, torch_linear

X = np.arange(1, 13, dtype="float32").reshape(4, 3, 1) / 6
Y = (X * 7 % 3).round()
IS_TOKEN = np.array([[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0]], "float32")
LOSS = keras.losses.MeanSquaredError("mean_with_sample_weight")


def step(rank, count):
    model, optimizer = torch_linear(DDP)
    parts = (np.array_split(rows, count)[rank] for rows in (X, Y, IS_TOKEN))
    x, y, is_token = map(torch.tensor, parts)
    losses = (model(x) - y)[..., 0] ** 2 * is_token
    (losses.sum() / is_token.sum()).backward()
    optimizer.step()
    return model.module.weight.item()


exhibit_ranks(__doc__, step, lambda: our_weight(X, Y, LOSS, sample_weight=IS_TOKEN))
