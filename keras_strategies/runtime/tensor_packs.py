"""Tensors of one dtype as one flat tensor, on their device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from keras import ops

from keras_strategies.runtime.engine import Engine


def pack(engine: Engine, tensors: Sequence[Any]) -> Any:
    """One flat tensor out of tensors of one dtype and device, on that device."""
    if len(tensors) == 1:
        return tensors[0]
    with engine.on_device_of(tensors[0]):
        return ops.concatenate([ops.reshape(tensor, (-1,)) for tensor in tensors])


def unpack(engine: Engine, packed: Any, like: Sequence[Any]) -> list[Any]:
    """The tensors of a pack, in the shapes of `like`, on the device of the pack.

    They have the memory formats of `like`, where the engine has such.
    """
    if len(like) == 1:
        return [packed]
    sizes = [math.prod(tensor.shape) for tensor in like]
    ends = list(itertools.accumulate(sizes))
    with engine.on_device_of(packed):
        return [
            engine.in_format_of(
                ops.reshape(packed[end - size : end], tuple(tensor.shape)), tensor
            )
            for size, end, tensor in zip(sizes, ends, like, strict=True)
        ]
