"""Input of `fit` as on accelerators, in front of CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def prepare_ahead(strategy: Any) -> Callable[[], None]:
    """Makes a strategy prepare batches ahead, as if its devices were accelerators.

    Pinned memory, which needs a GPU, is a copy; on TensorFlow the device is a virtual
    CPU other than the host.

    Returns:
        A function that ends it, for strategies that other tests use.
    """
    backend = keras.backend.backend()
    trainer = strategy.drivers.fit
    placer = trainer.placer
    is_ahead = getattr(placer, "_ahead", None)
    if backend == "torch":
        from keras_strategies.engines.torch import cuda_batches

        pinned = cuda_batches.pinned
        cuda_batches.pinned = lambda leaf: leaf.clone()
        trainer.placer = cuda_batches.PinningPrefetcher()
        if strategy.workers is not None:
            from keras_strategies.engines.torch.own_batches import (
                OwnBatchPlacer,
            )

            trainer.placer = OwnBatchPlacer(
                strategy.placement, trainer._call, trainer.placer
            )
    elif backend == "tensorflow":
        from keras_strategies.engines.tensorflow.epoch_datasets import EpochDatasets

        device = "/device:CPU:1"
        trainer.placer = EpochDatasets(device, placer._counts, placer._changing)
    else:
        trainer.placer._ahead = True

    def end() -> None:
        trainer.placer = placer
        if backend == "torch":
            cuda_batches.pinned = pinned
        if is_ahead is not None:
            placer._ahead = is_ahead

    return end
