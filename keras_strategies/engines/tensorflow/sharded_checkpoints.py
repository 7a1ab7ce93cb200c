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
from keras_strategies.engines.tensorflow.sharding.variables_over_workers import (
    VariableOverWorkers,
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
        group = None if self._workers is None else self._workers.group
        is_chief = group is None or group.is_chief
        names, slices, values = [], [], []
        for name, variable in _named(groups):
            raw = raw_value(variable)
            if is_chief or isinstance(raw, VariableOverWorkers):
                for slice_of, shard in _shards(raw):
                    names.append(name)
                    slices.append(slice_of)
                    values.append(shard.read_value())
        folder.mkdir(exist_ok=True)
        own = str(folder / _STATE) + ("" if group is None else f"-{group.index}")
        if names:
            with tf.device("CPU:0"):
                tf.raw_ops.SaveV2(
                    prefix=own,
                    tensor_names=names,
                    shape_and_slices=slices,
                    tensors=values,
                )
        if group is None:
            return
        written = group.gather_values(f"the files in {str(folder)!r}", bool(names))
        if is_chief:
            prefixes = [
                f"{folder / _STATE}-{i}" for i, any_ in enumerate(written) if any_
            ]
            with tf.device("CPU:0"):
                tf.raw_ops.MergeV2Checkpoints(
                    checkpoint_prefixes=prefixes,
                    destination_prefix=str(folder / _STATE),
                )


def _read(folder: Path, groups: dict[str, list[Any]]) -> None:
    for name, variable in _named(groups):
        raw = raw_value(variable)
        for slice_of, shard in _shards(raw):
            with tf.device("CPU:0"):
                [value] = tf.raw_ops.RestoreV2(
                    prefix=str(folder / _STATE),
                    tensor_names=[name],
                    shape_and_slices=[slice_of],
                    dtypes=[shard.dtype],
                )
            (variable if slice_of == _ALL else shard).assign(value)
        if isinstance(raw, VariableInShards):
            raw.value_assigned(None)


def _named(groups: dict[str, list[Any]]) -> Iterator[tuple[str, Any]]:
    for group, variables in groups.items():
        for i, variable in enumerate(variables):
            yield f"{group}/{key_of(i)}", variable


def _shards(raw: tf.Variable) -> list[tuple[str, tf.Variable]]:
    """The shards of a variable, and how TensorFlow names their slices."""
    if not isinstance(raw, VariableInShards):
        return [(_ALL, raw)]
    slices = _slices(raw.shape, raw.grid.parts)
    return [(slices[number], shard) for number, shard in raw.shards.items()]


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
