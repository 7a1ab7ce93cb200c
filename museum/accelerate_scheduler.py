"""A schedule runs through as many steps per step as there are processes.

A prepared scheduler is stepped once for each process, and is at its end too early.

Framework: Accelerate
Reported: accelerate 0.22, 2024-07; 0.16, 2023-05
Link: https://github.com/huggingface/accelerate/issues/2926
Number: the learning rate after four updates, halved every two
Upstream: `AcceleratedScheduler.step` steps `num_processes` times. Please log it once.
"""

import keras
import numpy as np
import torch
from accelerate import Accelerator

from museum.common import exhibit_ranks, linear, torch_linear, two_replicas


def step(rank, count):
    model, optimizer = torch_linear()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    accelerator = Accelerator(cpu=True)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    for _ in range(4):
        accelerator.backward(model(torch.ones(2 // count, 1)).mean())
        optimizer.step()
        schedule.step()
    return schedule.get_last_lr()[0]


def ours():
    halved = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)
    with two_replicas().scope():
        model = linear(rate=halved, loss="mse")
    model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=2, verbose=0)
    return keras.ops.convert_to_numpy(model.optimizer.learning_rate)


exhibit_ranks(__doc__, step, ours)
