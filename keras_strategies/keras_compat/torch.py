"""What is particular to Keras on Torch where variables are DTensors.

All of it is of Keras 3.16, which cuts variables with `torch.distributed`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras_strategies.keras_compat.models import strategy_of
from keras_strategies.keras_compat.patching import base_trainer, is_patched, replace


def distribution_class() -> Any:
    """What `keras.distribution.ModelParallel` and its siblings are derived from."""
    from keras.src.distribution.distribution_lib import Distribution

    return Distribution


def hook_torch_dtensors(
    whole: Callable[[Any], Any],
    alike: Callable[..., tuple[Any, ...]],
    read: Callable[[Any], Any],
) -> None:
    """Lets models of strategies compute with DTensors; later calls do nothing.

    Keras 3.16 on Torch, when torch's default process group exists:

    - `Trainer._initialize_ddp` wraps a model in `DistributedDataParallel`, and
      `Trainer.get_metrics_result` sums metrics over processes. Neither is for a model
      of a strategy, which sees the global batch in every process.
    - `dot_product_attention` takes the parts of its arguments that a process has for
      parts that belong together, whatever they are parts of.
    - `Layer._get_regularization_losses` computes with variables themselves.
    - `convert_to_numpy`, by which models are saved, gathers a variable's parts, for
      which every process has to read it.

    Args:
        whole: makes an ordinary tensor of a DTensor, and leaves others as they are.
        alike: makes parts of the query, key, value, bias and mask of attention belong
            together.
        read: gives the value of a variable or its tensor, a NumPy array, where it has
            been gathered, and None elsewhere.
    """
    from keras.src.backend.torch import ops
    from keras.src.backend.torch.ops import core, nn
    from keras.src.backend.torch.trainer import Trainer
    from keras.src.layers.layer import Layer

    base = base_trainer()

    def wrap_ddp(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _initialize_ddp(self: Any) -> None:
            if strategy_of(self) is None:
                original(self)

        return _initialize_ddp

    def wrap_metrics(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def get_metrics_result(self: Any) -> Any:
            if strategy_of(self) is None:
                return original(self)
            return base.get_metrics_result(self)

        return get_metrics_result

    def wrap_attention(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def dot_product_attention(
            query: Any,
            key: Any,
            value: Any,
            bias: Any = None,
            mask: Any = None,
            **kwargs: Any,
        ) -> Any:
            query, key, value, bias, mask = alike(query, key, value, bias, mask)
            return original(query, key, value, bias=bias, mask=mask, **kwargs)

        return dot_product_attention

    def wrap_losses(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _get_regularization_losses(self: Any) -> list[Any]:
            return [whole(loss) for loss in original(self)]

        return _get_regularization_losses

    def wrap_numpy(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def convert_to_numpy(x: Any) -> Any:
            found = read(x)
            return original(x) if found is None else found

        return convert_to_numpy

    if is_patched(nn):
        return
    for module in (ops, core):
        replace(module, "convert_to_numpy", wrap_numpy)
    replace(nn, "dot_product_attention", wrap_attention)
    replace(Trainer, "_initialize_ddp", wrap_ddp)
    replace(Trainer, "get_metrics_result", wrap_metrics)
    replace(Layer, "_get_regularization_losses", wrap_losses)
