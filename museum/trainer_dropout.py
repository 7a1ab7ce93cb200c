"""All processes drop the same units.

`set_seed` gives each process one seed, from which it draws masks for its own rows.

Framework: Transformers
Re-enacted: in torch.distributed
Reported: transformers 4.41.2, 2024-06
Link: https://github.com/huggingface/transformers/issues/31412
Number: how many different masks four rows have
"""

import keras
import torch

from museum.common import exhibit_ranks, two_replicas


def step(rank, count):
    torch.manual_seed(40)
    masks = torch.nn.functional.dropout(torch.ones(4 // count, 64))
    torch.distributed.all_gather_into_tensor(gathered := torch.empty(4, 64), masks)
    return len(torch.unique(gathered, dim=0))


class Masks(keras.Sequential):
    def train_step(self, data):
        self.masks = keras.ops.convert_to_numpy(self(data[0], training=True))
        return {}


def ours():
    keras.utils.set_random_seed(40)
    with two_replicas().scope():
        model = Masks([keras.Input((64,)), keras.layers.Dropout(0.5)])
        model.compile()
    model.train_on_batch(torch.ones(4, 64))
    return len({str(mask) for mask in model.masks})


exhibit_ranks(__doc__, step, ours)
