"""A training script of DDP or FSDP2 as it is written, and mistakes in it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np


def train(fault: str = "", kind: str = "ddp") -> None:
    """Three epochs of 22 rows in batches of 8; the last one of an epoch is uneven.

    Args:
        fault: what is wrong; empty for nothing.
        kind: "ddp" or "fsdp2".
    """
    import torch
    import torch.distributed as dist
    from torch import nn

    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    random = np.random.default_rng(0)
    x = torch.tensor(random.normal(size=(22, 6)), dtype=torch.float32)
    y = torch.tensor(random.normal(size=(22, 1)), dtype=torch.float32)
    torch.manual_seed(rank if fault == "different_start" else 0)
    layers: list[Any] = [nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5)]
    if fault == "batch_norm":
        layers.append(nn.BatchNorm1d(8))
    module = nn.Sequential(*layers, nn.Linear(8, 1))
    if fault != "same_masks":
        torch.manual_seed(100 + rank)
    model = wrapped(module, kind, fault)
    rate = 0.1 * count if fault == "scaled_rate" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(1 if fault == "own_file" else 3):
        for start in range(0, 22, 8):
            rows = rows_of(np.arange(start, min(start + 8, 22)), rank, count, fault)
            called = module if fault == "bypassed" else model
            errors = (called(x[rows]) - y[rows]) ** 2
            total = 8 if start < 16 else 6
            loss = loss_of(errors, total, count, fault)
            optimizer.zero_grad()
            loss.backward()
            if fault == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.01 * count)
            if fault == "left_out" and count > 1:
                module[-1].bias.grad = None
            optimizer.step()
            log(loss, errors, total, count, fault)
    if fault == "own_file" and rank == 0:
        torch.save({"rows": x[rank::count]}, os.devnull)


def with_sampler() -> None:
    """A batch size of each process, a sampler and the mean of DDP."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    dist.init_process_group("gloo")
    random = np.random.default_rng(0)
    rows = TensorDataset(
        *(torch.tensor(random.normal(size=(16, n))).float() for n in (6, 1))
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(6, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in DataLoader(rows, 4, sampler=DistributedSampler(rows)):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def wrapped(module: Any, kind: str, fault: str) -> Any:
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(module)
        return module
    from torch.nn.parallel import DistributedDataParallel

    if fault == "different_start":
        return module
    return DistributedDataParallel(module)


def rows_of(rows: Any, rank: int, count: int, fault: str) -> Any:
    if fault == "all_rows":
        return rows
    if fault == "padded" and count > 1:
        rows = np.concatenate([rows, rows[: -len(rows) % (4 * count)]])
    if fault == "dropped" and count > 1:
        rows = rows[: len(rows) // (4 * count) * (4 * count)]
    if fault == "batch_per_process":
        return (rows[0] + 8 * rank + np.arange(4)) % 22
    return rows[rank::count]


def loss_of(errors: Any, total: int, count: int, fault: str) -> Any:
    """The share of the global batch's mean; DDP divides by the processes."""
    if fault == "mean_of_means":
        weights = (errors.detach() > 0.5).float()
        return (errors * weights).sum() / weights.sum()
    if fault == "scaled_loss":
        return errors.sum() / total * count**2
    if fault == "half_loss":
        return errors.sum() / total
    return errors.sum() / total * count


def log(loss: Any, errors: Any, total: int, count: int, fault: str) -> None:
    import torch.distributed as dist

    import keras_strategies as ks

    value = errors.detach().sum() / total
    if fault == "own_log":
        value = value * count
    elif fault == "summed_log":
        value = errors.detach().mean()
        dist.all_reduce(value)
    else:
        dist.all_reduce(value)
    ks.observe(error=value)


def of_accelerate(fault: str = "") -> None:
    """Accelerate, which gives processes every second batch of a loader."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = prepared(accelerator.num_processes, fault)
    loader = accelerator.prepare(loader)
    if fault != "bare":
        model, optimizer = accelerator.prepare(model, optimizer)
    steps(model, optimizer, loader, accelerator.backward)


def of_fabric(fault: str = "") -> None:
    """Lightning Fabric, which gives each process a sampler."""
    from lightning_fabric import Fabric

    count = int(os.environ["WORLD_SIZE"])
    fabric = Fabric(accelerator="cpu", devices=count, strategy="ddp")
    fabric.launch()
    model, optimizer, loader = prepared(count, fault)
    loader = fabric.setup_dataloaders(loader)
    if fault != "bare":
        model, optimizer = fabric.setup(model, optimizer)
    steps(model, optimizer, loader, fabric.backward)


def prepared(count: int, fault: str) -> tuple[Any, Any, Any]:
    """A model, an optimizer, and a loader of 16 rows in global batches of 8."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    random = np.random.default_rng(0)
    rows = [torch.tensor(random.normal(size=(16, n))).float() for n in (6, 1)]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 1))
    rate = 0.1 * count if fault == "scaled_rate" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    return model, optimizer, DataLoader(TensorDataset(*rows), 8 // count)


def steps(model: Any, optimizer: Any, loader: Any, backward: Any) -> None:
    """Two epochs."""
    import torch

    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
