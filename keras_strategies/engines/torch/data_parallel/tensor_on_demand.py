"""Tensors with values that are computed when an operation needs them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from keras_strategies.engines.torch.compat import disabled_torch_function


class TensorOnDemand(torch.Tensor):
    """A tensor without memory of its own.

    Autograd sees an ordinary tensor. Below it, subclasses give operations the values
    in their `__torch_dispatch__`. Here are the methods that read memory or its layout
    without an operation, which Torch refuses without memory.
    """

    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def demanded(self) -> torch.Tensor:
        """A plain tensor with the values, without gradient."""
        raise NotImplementedError

    def _with_memory(self) -> torch.Tensor:
        return self.demanded().detach().requires_grad_(self.requires_grad)

    def numpy(self, *, force: bool = False) -> Any:
        return self._with_memory().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_memory().__array__(*args, **kwargs)

    def tolist(self) -> Any:
        return self.demanded().tolist()

    def data_ptr(self) -> int:
        return self.demanded().data_ptr()

    def untyped_storage(self) -> Any:
        return self.demanded().untyped_storage()

    def stride(self, *args: Any, **kwargs: Any) -> Any:
        return self.demanded().stride(*args, **kwargs)

    def is_contiguous(self, *args: Any, **kwargs: Any) -> bool:
        return self.demanded().is_contiguous(*args, **kwargs)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_memory().__dlpack__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._with_memory().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if not self.is_leaf:
            # Raises Torch's error.
            return torch.Tensor.__deepcopy__(self, memo)
        return copy.deepcopy(self._with_memory(), memo)

    def __format__(self, text: str) -> str:
        return format(self.demanded(), text) if text else repr(self)

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        # An operation on it: text of a tensor with a gradient has its function.
        return repr(self.view_as(self))


def on_values(
    kind: type[TensorOnDemand],
    func: Callable[..., Any],
    args: Iterable[Any],
    kwargs: dict[str, Any] | None,
) -> Any:
    """An operation on plain tensors in the place of those of a class."""
    kwargs = kwargs or {}
    named = dict(zip(kwargs, _with_values(kind, kwargs.values()), strict=True))
    return func(*_with_values(kind, args), **named)


def _with_values(kind: type[TensorOnDemand], args: Iterable[Any]) -> list[Any]:
    return [
        each.demanded()
        if isinstance(each, kind)
        else _with_values(kind, each)
        if isinstance(each, (list, tuple))
        else each
        for each in args
    ]


def plain(value: Any) -> Any:
    """A plain tensor for one on demand, with its gradient; other values unchanged."""
    return value.view_as(value) if isinstance(value, TensorOnDemand) else value
