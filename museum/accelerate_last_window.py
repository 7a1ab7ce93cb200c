"""`accumulate` divides the last, shorter window by as much as the others.

Three batches, accumulated in twos. The loader's end triggers an update after one batch,
and `backward` has divided its loss by two.

Framework: Accelerate
Reported: accelerate 0.21, 2023-08
Link: https://github.com/huggingface/accelerate/issues/1847
Number: the weight after an epoch of SGD
Upstream: `Accelerator.backward` divides by `gradient_accumulation_steps` in windows
  that the end of the loader has cut short. Please divide by the window's own length.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from museum.common import exhibit, our_epoch, torch_linear

ROWS = TensorDataset(torch.tensor([[1.0], [2], [3]]), torch.tensor([[2.0], [0], [1]]))


def weight(size):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 // size)
    loader = DataLoader(ROWS, batch_size=size)
    model, optimizer, loader = accelerator.prepare(*torch_linear(), loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.item()


exhibit(
    __doc__,
    lambda: weight(1),
    lambda: weight(2),
    lambda: our_epoch(DataLoader(ROWS, 2)),
)
