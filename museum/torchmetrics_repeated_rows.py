"""Scores of repeated rows enter a curve twice.

The metric gathers all scores, exactly. But `DistributedSampler` has given five rows to
two ranks as six, so the AUROC of two devices is not that of one.

Framework: torchmetrics
Re-enacted: in torch.distributed, with torch's DistributedSampler
Reported: torchmetrics, 2022-10
Link: https://github.com/Lightning-AI/torchmetrics/issues/1297
Number: the area under the ROC curve of five rows
"""

import keras
import numpy as np
import torch
from torch.utils.data import DistributedSampler

from museum.common import exhibit_ranks, our_metric, torch_linear

SCORES = np.array([0.8, 0.4, 0.35, 0.2, 0.9], "float32")[:, None]
LABELS = np.array([0, 1, 1, 0, 1])[:, None]


def auroc(scores, labels):
    return (scores[labels == 1][:, None] > scores[labels == 0]).mean()


def step(rank, count):
    own = torch.tensor(list(DistributedSampler(SCORES, count, rank, shuffle=False)))
    torch_linear()[0](torch.tensor(SCORES[own]))  # a model reads these rows
    rows = [torch.empty_like(own) for _ in range(count)]
    torch.distributed.all_gather(rows, own)
    rows = torch.cat(rows).numpy()
    return auroc(SCORES[rows], LABELS[rows])


exhibit_ranks(__doc__, step, lambda: our_metric(SCORES, LABELS, keras.metrics.AUC()))
