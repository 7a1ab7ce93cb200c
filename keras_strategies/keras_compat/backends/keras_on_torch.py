"""Use of Keras on Torch beyond its public interface, with DTensors as variables.

All of it is of Keras 3.16, which shards variables with `torch.distributed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras_strategies.keras_compat import patching


def distribution_class() -> Any:
    """Base class of `keras.distribution.ModelParallel` and its siblings."""
    from keras.src.distribution.distribution_lib import Distribution

    return Distribution


class _Tensors:
    whole: Callable[[Any], Any]
    alike: Callable[..., tuple[Any, ...]]
    read: Callable[[Any], Any]


def hook_torch_dtensors(
    whole: Callable[[Any], Any],
    alike: Callable[..., tuple[Any, ...]],
    read: Callable[[Any], Any],
) -> None:
    """Lets models of strategies compute with DTensors; later calls do nothing.

    Args:
        whole: makes an ordinary tensor of a DTensor, and leaves others as they are.
        alike: makes parts of the query, key, value, bias and mask of attention belong
            together.
        read: gives the value of a variable or its tensor, a NumPy array, where it has
            been gathered, and None elsewhere.
    """
    _Tensors.whole, _Tensors.alike, _Tensors.read = whole, alike, read
    patching.install("torch dtensors")


def attention(
    original: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    **kwargs: Any,
) -> Any:
    query, key, value, bias, mask = _Tensors.alike(query, key, value, bias, mask)
    return original(query, key, value, bias=bias, mask=mask, **kwargs)


def regularization_losses(original: Any, self: Any) -> list[Any]:
    return [_Tensors.whole(loss) for loss in original(self)]


def to_numpy(original: Any, x: Any) -> Any:
    found = _Tensors.read(x)
    return original(x) if found is None else found
