"""Sharded checkpoints in TensorFlow's own format, which stores slices of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_strategies.engines.tensorflow.sharding.variables_in_shards import (
    VariableInShards,
)
from keras_strategies.keras_compat.variables.values import raw_value
from keras_strategies.runtime.drivers import CheckpointDriver
from keras_strategies.runtime.placement import Placement
from keras_strategies.runtime.state.checkpointed_variables import key_of
from keras_strategies.runtime.state.numbered_checkpoints import (
    load_numbered,
    save_numbered,
)

#: Of a checkpoint's folder: the beginning of the names of TensorFlow's files.
_STATE = "state"
#: A slice that is the full tensor.
_ALL = ""


class TensorFlowCheckpoints(CheckpointDriver):
    """Checkpoints of one strategy; each shard is written and read by itself.

    Args:
        placement: the devices of the variables, and the workers.
    """

    def __init__(self, placement: Placement):
        self._workers = placement.workers

    def save_sharded(self, model: Any, directory: Path, keep: int) -> int:
        return save_numbered(model, directory, keep, self._workers, self._write)

    def load_sharded(self, model: Any, directory: Path) -> int:
        return load_numbered(model, directory, self._workers, _read)

    def _write(self, folder: Path, groups: dict[str, list[Any]]) -> None:
        if self._workers is not None and not self._workers.is_chief:
            return
        folder.mkdir()
        names, slices, values = [], [], []
        for name, variable in _named(groups):
            for slice_of, shard in _shards(raw_value(variable)):
                names.append(name)
                slices.append(slice_of)
                values.append(shard.read_value())
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(folder / _STATE),
                tensor_names=names,
                shape_and_slices=slices,
                tensors=values,
            )


def _read(folder: Path, groups: dict[str, list[Any]]) -> None:
    for name, variable in _named(groups):
        for slice_of, shard in _shards(raw_value(variable)):
            with tf.device("CPU:0"):
                [value] = tf.raw_ops.RestoreV2(
                    prefix=str(folder / _STATE),
                    tensor_names=[name],
                    shape_and_slices=[slice_of],
                    dtypes=[shard.dtype],
                )
            (variable if slice_of == _ALL else shard).assign(value)


def _named(groups: dict[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    for group, variables in groups.items():
        for i, variable in enumerate(variables):
            yield f"{group}/{key_of(i)}", variable


def _shards(raw: tf.Variable) -> list[tuple[str, tf.Variable]]:
    """The shards of a variable, and how TensorFlow names their slices."""
    if not isinstance(raw, VariableInShards):
        return [(_ALL, raw)]
    return list(zip(_slices(raw.shape, raw.grid.parts), raw.shards, strict=True))


def _slices(shape: Sequence[int], parts: Sequence[int]) -> list[str]:
    """Names of the slices of an array, in row-major order.

    >>> _slices((4, 2), (2, 1))
    ['4 2 0,2:0,2', '4 2 2,2:0,2']
    """
    full = " ".join(map(str, shape))
    sizes = [length // count for length, count in zip(shape, parts, strict=True)]
    return [
        f"{full} "
        + ":".join(f"{i * size},{size}" for i, size in zip(place, sizes, strict=True))
        for place in itertools.product(*map(range, parts))
    ]
