"""Input that can be read once, and a model whose loss tells which batches it saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

import keras_strategies as ks

#: Six batches of two rows: those of batch `i` are `i`, its loss is `i * i`.
BATCHES = [
    (np.full((2, 1), i, "float32"), np.zeros((2, 1), "float32")) for i in range(6)
]
#: The loss of all batches.
LOSS = 55 / 6


def model(steps_per_execution: int = 1, is_built: bool = True) -> keras.Model:
    """Outputs its input, and does not learn."""
    layers: list[Any] = [keras.Input((1,))] if is_built else []
    layers.append(keras.layers.Dense(1, kernel_initializer="ones", use_bias=False))
    made = keras.Sequential(layers)
    made.compile(
        keras.optimizers.SGD(0.0), "mse", steps_per_execution=steps_per_execution
    )
    return made


def _generator() -> Iterator[Any]:
    yield from BATCHES


def _tf_data() -> Any:
    import tensorflow as tf

    remaining = iter(BATCHES)
    spec = tf.TensorSpec((None, 1))
    return tf.data.Dataset.from_generator(
        lambda: remaining, output_signature=(spec, spec)
    )


def _loader() -> Any:
    import torch

    class Stream(torch.utils.data.IterableDataset):
        def __init__(self) -> None:
            self.remaining = iter(BATCHES)

        def __iter__(self) -> Iterator[Any]:
            return self.remaining

    return torch.utils.data.DataLoader(Stream(), batch_size=None)


class Shuffled(keras.utils.PyDataset):
    """Changes the order of its batches after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(6))

    @property
    def num_batches(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return BATCHES[self.order[index]]

    def on_epoch_end(self) -> None:
        self.order = self.order[1:] + self.order[:1]


#: Makers of input by the modules that they need.
STREAMS: dict[str, Callable[[], Any]] = {
    "generator": _generator,
    "tf_data": _tf_data,
    "loader": _loader,
    "py_dataset": Shuffled,
    "creator": lambda: ks.DatasetCreator(lambda context: _generator()),
    "creator_of_tf_data": lambda: ks.DatasetCreator(lambda context: _tf_data()),
    "creator_of_loader": lambda: ks.DatasetCreator(lambda context: _loader()),
}


def steps(trained: keras.Model) -> int:
    return int(keras.ops.convert_to_numpy(trained.optimizer.iterations))
