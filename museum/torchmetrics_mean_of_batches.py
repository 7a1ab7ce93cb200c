"""A functional metric is logged as the mean over batches and ranks.

`torchmetrics.functional.auroc` of each batch, logged by `self.log`, becomes a mean of
areas. The class of the same name keeps scores and compares all of them.

Framework: torchmetrics
Re-enacted: in torch.distributed
Reported: hypertorch, 2026-03
Link: https://github.com/hypernetwork-research-group/hypertorch/pull/113
Number: the area under the ROC curve of eight rows, in batches of four
"""

import keras
import numpy as np
import torch

from museum.common import exhibit_ranks, our_metric

SCORES = np.array([0.1, 0.4, 0.35, 0.2, 0.8, 0.9, 0.7, 0.65], "float32")[:, None]
LABELS = np.array([0, 1, 0, 1, 0, 1, 1, 0])[:, None]


def auroc(scores, labels):
    return (scores[labels == 1][:, None] > scores[labels == 0]).mean()


def step(rank, count):
    value = torch.tensor(auroc(SCORES[rank::count], LABELS[rank::count]))
    torch.distributed.all_reduce(value)
    return value.item() / count


exhibit_ranks(
    __doc__,
    step,
    lambda: our_metric(SCORES, LABELS, keras.metrics.AUC(), batch_size=4),
)
