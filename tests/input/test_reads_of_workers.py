"""Eight workers read each row of a loader once, with the numbers of one device."""

from __future__ import annotations

import collections
from typing import Any

import keras
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import keras_strategies as ks
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.loaders.loader_rows import batches_of_worker, seeded_loader

pytestmark = pytest.mark.one_backend
WORKERS, ROWS, BATCH = 8, 203, 32
_random = np.random.default_rng(0)
IMAGES = _random.integers(0, 256, (ROWS, 6, 6, 3)).astype("uint8")
LABELS = np.arange(ROWS)


class Counting(Dataset):
    """A dataset that counts reads of its rows."""

    def __init__(self) -> None:
        self.reads: collections.Counter[int] = collections.Counter()

    def __len__(self) -> int:
        return ROWS


class Folder(Counting):
    """Images with the random crop and flip of torchvision's recipes for training."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.reads[index] += 1
        image = torch.from_numpy(IMAGES[index]).permute(2, 0, 1) / 255
        top, left = torch.randint(0, 3, (2,)).tolist()
        image = image[:, top : top + 4, left : left + 4]
        if torch.rand(1) < 0.5:
            image = image.flip(-1)
        return image, int(LABELS[index])


class Masked(Counting):
    """Tokens as dicts, some of which are masked at random, as of Hugging Face."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        tokens = IMAGES[index].reshape(-1)[:8].astype("int64")
        is_masked = np.random.uniform(size=8) < 0.3
        return {
            "input_ids": np.where(is_masked, 1, tokens).tolist(),
            "labels": np.where(is_masked, tokens, -100).tolist(),
            "index": index,
        }


@ks.row_wise
def default_data_collator(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """As that of `transformers`, which stacks each entry."""
    names = features[0]
    return {name: torch.tensor([each[name] for each in features]) for name in names}


def loader(dataset: Counting) -> Any:
    keras.utils.set_random_seed(3)
    # Workers have the chief's; Keras seeds Torch on Torch only.
    torch.manual_seed(3)
    collate = default_data_collator if isinstance(dataset, Masked) else None
    return DataLoader(dataset, BATCH, shuffle=True, collate_fn=collate)


def rows_of(batches: Any) -> list[list[np.ndarray]]:
    return [[np.asarray(x) for x in keras.tree.flatten(batch)] for batch in batches]


@pytest.mark.parametrize("kind", [Folder, Masked])
def test_each_row_is_read_once(kind: type[Counting]) -> None:
    expected = rows_of(seeded_loader(loader(kind())))
    parts, reads = [], []
    for worker in range(WORKERS):
        dataset = kind()
        counts = ReplicaCounts((1,) * WORKERS, worker)
        own = [
            [each[start:stop] for each in batch]
            for batch, [(start, stop)] in (
                (rows_of([batch])[0], ranges)
                for batch, ranges in batches_of_worker(loader(dataset), counts)
            )
        ]
        parts.append(own)
        reads.append(dataset.reads)
    assert sum(reads, collections.Counter()) == dict.fromkeys(range(ROWS), 1)
    assert max(map(len, reads)) - min(map(len, reads)) <= -(-ROWS // BATCH)
    for whole, *every in zip(expected, *parts, strict=True):
        for leaf, *leaves in zip(whole, *every, strict=True):
            np.testing.assert_array_equal(np.concatenate(leaves), leaf)
