"""Datasets that move their batches to a device ahead of the step."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# Batches that are on the device, or on their way, while one is computed with.
_AHEAD = 1


class AheadPlacer:
    """Puts the batches of `fit` and its siblings on a device, one ahead of the step.

    Args:
        device: as TensorFlow names it, `/device:KIND:INDEX`.
    """

    def __init__(self, device: str):
        self._device = device

    def dataset(self, dataset: Any) -> Any:
        """A data set of the same batches on the device.

        Data sets with strings, or sparse or ragged tensors, stay as they are: these
        live on the host.
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
