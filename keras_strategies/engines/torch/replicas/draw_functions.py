"""Functions of torch that draw random numbers, and the shapes of what they draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from keras_strategies.engines.torch.compat import RANDOM_FUNCTIONS

Function = Callable[..., Any]
#: Functions of a size, with the position of the size among their arguments.
SIZED: dict[Function, int] = {
    torch.rand: 0,
    torch.randn: 0,
    torch.randint: 2,
    torch.randperm: 0,
    torch.normal: 2,
}
#: Functions that draw for each entry of a tensor, as many numbers for each.
_OF_TENSORS = frozenset(
    [
        torch.alpha_dropout,
        torch.bernoulli,
        torch.dropout,
        torch.feature_alpha_dropout,
        torch.feature_dropout,
        torch.multinomial,
        torch.native_dropout,
        torch.rand_like,
        torch.randint_like,
        torch.randn_like,
        torch.Tensor.bernoulli,
        torch.Tensor.multinomial,
        functional.alpha_dropout,
        functional.dropout,
        functional.dropout1d,
        functional.dropout2d,
        functional.dropout3d,
        functional.feature_alpha_dropout,
        functional.gumbel_softmax,
        functional.multi_head_attention_forward,
        functional.scaled_dot_product_attention,
    ]
)
_ATTENTION = frozenset(
    [
        functional.multi_head_attention_forward,
        functional.scaled_dot_product_attention,
    ]
)
#: Functions that fill a tensor.
IN_PLACE = frozenset(
    getattr(torch.Tensor, name)
    for name in [
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "uniform_",
    ]
)
#: Functions that draw more numbers for some parameters than for others.
OF_PARAMETERS = frozenset(
    [torch.binomial, torch.poisson, torch.rrelu, functional.rrelu, *RANDOM_FUNCTIONS]
)
#: Dropouts, with the position of the argument `training`.
_DROPOUTS = {
    torch.alpha_dropout: 2,
    torch.dropout: 2,
    torch.feature_alpha_dropout: 2,
    torch.feature_dropout: 2,
    torch.native_dropout: 2,
    functional.alpha_dropout: 2,
    functional.dropout: 2,
    functional.dropout1d: 2,
    functional.dropout2d: 2,
    functional.dropout3d: 2,
    functional.feature_alpha_dropout: 2,
    torch.rrelu: 3,
    functional.rrelu: 3,
}
# Those that do not train unless they are told to.
_OFF_BY_DEFAULT = frozenset(
    [
        functional.alpha_dropout,
        functional.feature_alpha_dropout,
        torch.rrelu,
        functional.rrelu,
    ]
)
_WITH_GENERATOR = frozenset(
    [
        *SIZED,
        *IN_PLACE,
        *RANDOM_FUNCTIONS,
        torch.bernoulli,
        torch.binomial,
        torch.multinomial,
        torch.poisson,
        torch.Tensor.bernoulli,
        torch.Tensor.multinomial,
    ]
)
_ALL = frozenset(SIZED) | _OF_TENSORS | IN_PLACE | OF_PARAMETERS


def is_draw(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a function of torch draws random numbers."""
    if func not in _ALL:
        return False
    if func in _DROPOUTS:
        default = func not in _OFF_BY_DEFAULT
        name = "train" if func.__module__ != functional.__name__ else "training"
        return bool(_argument(args, kwargs, _DROPOUTS[func], name, default))
    if func is functional.scaled_dot_product_attention:
        return bool(_argument(args, kwargs, 4, "dropout_p", 0.0))
    if func is functional.multi_head_attention_forward:
        rate = _argument(args, kwargs, 10, "dropout_p", 0.0)
        return bool(rate and _argument(args, kwargs, 13, "training", True))
    return True


def _argument(
    args: Sequence[Any], kwargs: dict[str, Any], position: int, name: str, default: Any
) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def length_of(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any]
) -> int | None:
    """The length of axis 0 of a draw; None without axes."""
    if func in SIZED and not is_of_tensors(func, args, kwargs):
        size = size_of(func, args, kwargs)
        return size[0] if size else None
    first = first_tensor(args, kwargs)
    return len(first) if first.ndim and not mixes_axis_0(func, args, kwargs) else None


def first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    values = (*args, *kwargs.values())
    return next(each for each in values if isinstance(each, torch.Tensor))


def mixes_axis_0(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a result may depend on several entries of axis 0: then nothing but a
    proof says that this axis has the rows."""
    if func in _ATTENTION:
        return True
    rank = first_tensor(args, kwargs).ndim
    if func in (torch.multinomial, torch.Tensor.multinomial):
        return rank == 1
    if func is functional.gumbel_softmax:
        return bool(_argument(args, kwargs, 4, "dim", -1) in (0, -rank))
    return False


def is_of_tensors(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `torch.normal` has tensors of means or deviations."""
    values = (*args, *map(kwargs.get, ("mean", "std")))
    return func is torch.normal and any(isinstance(v, torch.Tensor) for v in values)


def with_rows(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], total: int
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with another length of axis 0 of the size."""
    if func is torch.randperm:
        if args:
            return [total, *args[1:]], kwargs
        return [], {**kwargs, "n": total}
    if "size" in kwargs:
        return list(args), {**kwargs, "size": (total, *kwargs["size"][1:])}
    position = _position(func, args)
    given = list(args)
    if isinstance(given[position], int):  # Sizes one by one.
        given[position] = total
    else:
        given[position] = (total, *given[position][1:])
    return given, kwargs


def _position(func: Function, args: Sequence[Any]) -> int:
    """The position of the size among the arguments."""
    if func is torch.randint and len(args) == 2:
        return 1  # Without the smallest number.
    return SIZED[func]


def size_of(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[int, ...]:
    """The size of a draw; empty for a number."""
    if func is torch.randperm:
        return (int(args[0] if args else kwargs["n"]),)
    given = kwargs["size"] if "size" in kwargs else args[_position(func, args) :]
    if "size" not in kwargs and given and isinstance(given[0], Sequence):
        given = given[0]
    return (given,) if isinstance(given, int) else tuple(map(int, given))


def has_generator(func: Function) -> bool:
    """Whether a function draws from an argument `generator`."""
    return func in _WITH_GENERATOR
