"""Probes on Torch: layer calls without gradients and randomness."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from keras_strategies.engines.torch.compat import RANDOM_FUNCTIONS
from keras_strategies.engines.torch.devices import device_of_call, torch_device
from keras_strategies.runtime.row_checks.layer_probes import LayerProbes

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

_functional = torch.nn.functional
# Functions with a result that is filled with a constant; all take a `generator`.
_FILLED = frozenset(
    [
        torch.binomial,
        torch.normal,
        torch.poisson,
        torch.rand,
        torch.randn,
        *RANDOM_FUNCTIONS,
        torch.Tensor.cauchy_,
        torch.Tensor.exponential_,
        torch.Tensor.geometric_,
        torch.Tensor.log_normal_,
        torch.Tensor.normal_,
        torch.Tensor.random_,
        torch.Tensor.uniform_,
    ]
)
_FILLED_LIKE = frozenset([torch.rand_like, torch.randn_like, torch.randint_like])
# Functions that return their input.
_IDENTITY = frozenset(
    [
        torch.rrelu,
        _functional.alpha_dropout,
        _functional.dropout,
        _functional.dropout1d,
        _functional.dropout2d,
        _functional.dropout3d,
        _functional.feature_alpha_dropout,
        _functional.rrelu,
    ]
)


class ConstantRandomNumbers(TorchFunctionMode):
    """Constants in place of random numbers; permutations reverse the order.

    Args:
        quantile: float in [0, 1], how large the constants are in the range of what
            is drawn.
    """

    def __init__(self, quantile: float):
        super().__init__()
        self._quantile = quantile
        self.drawn = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        replacement = self._replacement(func)
        if replacement is None:
            return func(*args, **kwargs)
        self.drawn = True
        return replacement(func, args, kwargs)

    def _replacement(self, func: Callable[..., Any]) -> Any:
        if func in _FILLED:
            return self._filled
        if func in _FILLED_LIKE:
            return lambda _, args, kwargs: torch.full_like(
                args[0], self._quantile, **_options(kwargs)
            )
        if func in _IDENTITY:
            return lambda _, args, kwargs: args[0] if args else kwargs["input"]
        return {
            torch.bernoulli: self._bernoulli,
            torch.Tensor.bernoulli_: self._bernoulli_in_place,
            torch.multinomial: self._multinomial,
            torch.randint: self._randint,
            torch.randperm: lambda _, args, kwargs: torch.arange(
                *args, **_options(kwargs)
            ).flip(0),
            _functional.gumbel_softmax: lambda _, args, kwargs: torch.softmax(
                args[0] if args else kwargs["logits"], kwargs.get("dim", -1)
            ),
            _functional.scaled_dot_product_attention: self._attention,
        }.get(func)

    def _filled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """A constant of the function's result shape; a separate generator draws it."""
        own = torch.Generator(device=device_of_call(args, kwargs))
        return func(*args, **{**kwargs, "generator": own}).fill_(self._quantile)

    def _bernoulli(self, _: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        chances = args[0] if args else kwargs["input"]
        chance = args[1] if len(args) > 1 else kwargs.get("p")
        found = chances if chance is None else torch.full_like(chances, chance)
        return (found > 1 - self._quantile).to(chances.dtype)

    def _bernoulli_in_place(
        self, _: Any, args: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        tensor: torch.Tensor = args[0]
        chance = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return tensor.copy_(torch.as_tensor(chance) > 1 - self._quantile)

    def _multinomial(self, _: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        given = dict(zip(("input", "num_samples", "replacement"), args, strict=False))
        given |= kwargs
        count = given.get("num_samples", 1)
        if given.get("replacement"):
            likeliest = given["input"].argmax(-1, keepdim=True)
            return likeliest.expand(*likeliest.shape[:-1], count).clone()
        return given["input"].topk(count, dim=-1).indices

    def _randint(self, _: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        numbers = [
            arg for arg in args if not isinstance(arg, (tuple, list, torch.Size))
        ]
        sizes = [arg for arg in args if isinstance(arg, (tuple, list, torch.Size))]
        size = sizes[0] if sizes else kwargs["size"]
        high = int(kwargs["high"] if "high" in kwargs else numbers[-1])
        low = int(kwargs.get("low", numbers[0] if len(numbers) > 1 else 0))
        value = low + int((high - low) * self._quantile)
        dtype = kwargs.get("dtype") or torch.int64
        return torch.full(size, value, **{**_options(kwargs), "dtype": dtype})

    def _attention(self, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        return func(*args, **{k: v for k, v in kwargs.items() if k != "dropout_p"})


def _options(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k in ("dtype", "device", "layout")}


class TorchProbes(LayerProbes):
    """Calls on a few rows, without gradients and randomness."""

    def __init__(self, strategy: StrategyCore):
        super().__init__(strategy)
        self._device = torch_device(strategy.placement.variables)

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def first_rows(self, tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
        return tensor[:rows].detach().to(self._device)

    @contextlib.contextmanager
    def probing(self, quantile: float) -> Iterator[ConstantRandomNumbers]:
        numbers = ConstantRandomNumbers(quantile)
        # On CUDA, TF32 rounds by more than the differences that probes detect.
        with torch.no_grad(), _full_precision(self._device), numbers:
            yield numbers


@contextlib.contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = False
    try:
        yield
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value
