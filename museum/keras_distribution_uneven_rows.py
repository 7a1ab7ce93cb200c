"""`DataParallel` on Torch takes the mean of the processes' means.

Keras 3.16 gives process r the rows r, r + n, ... of arrays and wraps the model in DDP.
Of five rows one process has three, the other two, and their means weigh the same.

Framework: keras.distribution
Re-enacted: in DDP, from the source of Keras 3.16, which is not the installed one
Reported: the code is of 2026-06; no thread on its numbers was found
Link: https://github.com/keras-team/keras/pull/23046
Number: the weight after a step of SGD
"""

import keras
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from museum.common import exhibit_ranks, linear, our_epoch

X = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]], "float32")
Y = np.array([[2.0], [0.0], [1.0], [9.0], [8.0]], "float32")


def step(rank, count):
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (torch.tensor(rows[rank::count]) for rows in (X, Y))
    keras.losses.MeanSquaredError()(y, DDP(model)(x)).backward()
    optimizer.step()
    return model.get_weights()[0]


exhibit_ranks(__doc__, step, lambda: our_epoch(X, Y, batch_size=5))
