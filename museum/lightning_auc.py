"""The AUC of an epoch is the mean of the ranks' AUCs.

An area under a curve is no mean over rows: a rank does not compare its positives with
the negatives of the others.

Framework: Lightning
Re-enacted: in torch.distributed
Reported: lightning 0.8.5, 2020-08
Link: https://github.com/Lightning-AI/pytorch-lightning/issues/3023
Number: the area under the ROC curve of eight rows
"""

import keras
import numpy as np
import torch

from museum.common import exhibit_ranks, our_metric

SCORES = np.array([0.1, 0.4, 0.35, 0.2, 0.8, 0.9, 0.7, 0.65], "float32")[:, None]
LABELS = np.array([0, 1, 1, 0, 0, 1, 1, 0])[:, None]


def auc(scores, labels):
    return (scores[labels == 1][:, None] > scores[labels == 0]).mean()


def step(rank, count):
    own = auc(*(np.array_split(rows, count)[rank] for rows in (SCORES, LABELS)))
    value = torch.tensor(own)
    torch.distributed.all_reduce(value)
    return value.item() / count


exhibit_ranks(__doc__, step, lambda: our_metric(SCORES, LABELS, keras.metrics.AUC()))
