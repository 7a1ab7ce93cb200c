"""Processes read overlapping rows where a sampler shuffles with the global generator.

Accelerate takes every second batch of an order that each process draws by itself. If
one has drawn more numbers before, for an evaluation, the orders differ.

Framework: Accelerate
Reported: lerobot with accelerate 1.13, 2026-06
Link: https://github.com/huggingface/lerobot/pull/3768
Number: how many of eight rows an epoch reads
Upstream: Please warn about samplers without the attribute `generator`.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Sampler

from museum.common import exhibit_ranks, our_rows, torch_linear


class Shuffled(Sampler):
    def __len__(self):
        return 8

    def __iter__(self):
        return iter(torch.randperm(8).tolist())


def loader(batch_size):
    return DataLoader(torch.arange(8), batch_size, sampler=Shuffled())


def step(rank, count):
    torch.manual_seed(rank)  # as if rank 1 had drawn more numbers before
    accelerator = Accelerator(cpu=True)
    rows = torch.cat(list(accelerator.prepare(loader(4 // count))))
    torch_linear()[0](rows[:, None].float())  # a model reads them
    return len(torch.unique(accelerator.gather(rows)))


exhibit_ranks(__doc__, step, lambda: len(torch.unique(torch.cat(our_rows(loader(4))))))
