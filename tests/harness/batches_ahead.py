"""Input of `fit` as on accelerators, in front of CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def _copied(batch: Any) -> Callable[[], Any]:
    copies = keras.tree.map_structure(lambda leaf: leaf.clone(), batch)
    return lambda: copies


def prepare_ahead(strategy: Any) -> Callable[[], None]:
    """Makes a strategy prepare batches ahead, as if its devices were accelerators.

    On Torch a batch on its device is a copy; on TensorFlow the device is a virtual CPU
    other than the host.

    Returns:
        A function that ends it, for strategies that other tests use.
    """
    backend = keras.backend.backend()
    trainer = strategy.drivers.fit
    placer = trainer.placer
    is_ahead = getattr(placer, "_ahead", None)
    if backend == "torch":
        from keras_strategies.engines.torch.cuda_batches import BatchPrefetcher

        trainer.placer = BatchPrefetcher(_copied)
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
        if is_ahead is not None:
            placer._ahead = is_ahead

    return end
