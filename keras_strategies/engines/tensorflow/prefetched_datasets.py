"""Datasets with batches that are prefetched to a device."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Batches on the device, or being transferred, besides the one in use.
_AHEAD = 1


class DatasetPrefetcher:
    """Prefetches the batches of `fit`, `evaluate` and `predict` to a device.

    Args:
        device: as TensorFlow names it, `/device:KIND:INDEX`.
    """

    def __init__(self, device: str):
        self._device = device

    def dataset(self, dataset: Any) -> Any:
        """The dataset, with its batches on the device.

        A dataset with strings, sparse or ragged tensors is returned unchanged: these
        stay on the host.
        """
        if not isinstance(dataset, tf.data.Dataset) or not _is_movable(dataset):
            return dataset
        with tf.device(self._device):
            return dataset.apply(
                tf.data.experimental.prefetch_to_device(self._device, _AHEAD)
            )


def _is_movable(dataset: tf.data.Dataset) -> bool:
    specs = tf.nest.flatten(dataset.element_spec)
    return all(
        isinstance(spec, tf.TensorSpec)
        and spec.dtype not in (tf.string, tf.variant, tf.resource)
        for spec in specs
    )
