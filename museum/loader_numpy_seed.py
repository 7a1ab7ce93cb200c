"""The processes of a `DataLoader` augment with the same numbers of NumPy.

Forked processes inherited NumPy's generator in one state: the first row of each process
was augmented alike, the second too, and so in each epoch.

Framework: data loaders
Reported: torch, 2018-02; mended by pytorch#56488, 2021-04
Link: https://github.com/pytorch/pytorch/issues/5059
Number: how many different augmentations eight rows have
"""

import numpy as np
from torch.utils.data import DataLoader, Dataset

from museum.common import exhibit, our_rows


class Augmented(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return float(np.random.random())


def different(batches):
    return len({float(x) for batch in batches for x in np.ravel(batch)})


exhibit(
    __doc__,
    lambda: different(DataLoader(Augmented(), batch_size=2, num_workers=2)),
    lambda: different(DataLoader(Augmented(), batch_size=2)),
    lambda: different(our_rows(DataLoader(Augmented(), batch_size=2, num_workers=2))),
)
