"""Each process reads all rows of an `IterableDataset`.

A sampler cannot split a stream. Without code of its own for ranks, the dataset yields
every row in every process: an epoch trains on each row once per process.

Framework: data loaders
Reported: datasets, 2022-12
Link: https://github.com/huggingface/datasets/issues/5360
Number: the rows of an epoch of eight rows
Upstream: `DataLoader` could warn where a process group of several ranks is initialized
  and an `IterableDataset` asks neither for its rank nor for its worker.
"""

import torch
from torch.utils.data import DataLoader, IterableDataset

from museum.common import exhibit_ranks, our_rows, torch_linear


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(8))


def step(rank, count):
    model, optimizer = torch_linear()
    rows = torch.tensor(0)
    for x in DataLoader(Stream(), batch_size=2):
        model(x[:, None].float()).mean().backward()
        optimizer.step()
        rows += len(x)
    torch.distributed.all_reduce(rows)
    return rows.item()


exhibit_ranks(
    __doc__, step, lambda: sum(map(len, our_rows(DataLoader(Stream(), batch_size=2))))
)
