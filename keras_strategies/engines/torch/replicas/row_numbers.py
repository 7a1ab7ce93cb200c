"""Random numbers of a replica's rows on Torch.

A generator of Torch is a sequence: where a number stands in it depends on how many were
drawn before. A replica therefore draws for all rows of the call, as one device does,
and keeps those of its rows. What is drawn for others costs time that grows with the
replicas, and no memory beyond the draw.

Draws are found by a function mode, so that those of Keras and of users' code are
treated alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from keras_strategies.engines.torch.compat import RANDOM_FUNCTIONS
from keras_strategies.runtime.data_parallel.row_draws import OwnRows, row_draws

Function = Callable[..., Any]
#: Functions of a size, with the position of the size among their arguments.
_SIZED: dict[Function, int] = {
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
        torch.rrelu,
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
        functional.rrelu,
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
_IN_PLACE = frozenset(
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
_OF_PARAMETERS = frozenset([torch.binomial, torch.poisson, *RANDOM_FUNCTIONS])
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
_ALL = frozenset(_SIZED) | _OF_TENSORS | _IN_PLACE | _OF_PARAMETERS


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


class RowNumbers(TorchFunctionMode):
    """Function mode of a replica: draws of `row_draws` have the numbers of its rows."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        draws = row_draws()
        if draws is None or not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        rows = draws.next_draw(_length(func, args, kwargs))
        if rows is None:
            return func(*args, **kwargs)
        return drawn_rows(func, args, kwargs, rows)


def drawn_rows(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], rows: OwnRows
) -> Any:
    """The entries of some rows, of what a function draws for all rows."""
    if func in _SIZED and not _is_of_tensors(func, args, kwargs):
        sized_args, sized = _with_rows(func, args, kwargs, rows.total)
        return _own(func(*sized_args, **sized), rows)
    if func in _IN_PLACE:
        whole = _whole(args[0], rows)
        padded_args = [_padded(value, args[0].ndim, rows) for value in args[1:]]
        func(whole, *padded_args, **kwargs)
        with torch.no_grad():
            return args[0].copy_(whole.narrow(0, rows.before, rows.own))
    if func is functional.dropout:
        return _dropout(rows, *args, **kwargs)
    first = _first_tensor(args, kwargs)
    padded = [_padded(value, first.ndim, rows) for value in args]
    named = {name: _padded(value, first.ndim, rows) for name, value in kwargs.items()}
    found = func(*padded, **named)
    if isinstance(found, tuple):
        return tuple(each if each is None else _own(each, rows) for each in found)
    return _own(found, rows)


def _length(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> int | None:
    """The length of axis 0 of a draw; None without axes."""
    if func in _SIZED and not _is_of_tensors(func, args, kwargs):
        if func is torch.randperm:
            return int(args[0] if args else kwargs["n"])
        size = _size(func, args, kwargs)
        size = size[:1] if isinstance(size, Sequence) else (size,)
        return int(size[0]) if size else None
    first = _first_tensor(args, kwargs)
    return len(first) if first.ndim and not _mixes_axis_0(func, args, kwargs) else None


def _first_tensor(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    values = (*args, *kwargs.values())
    return next(each for each in values if isinstance(each, torch.Tensor))


def _mixes_axis_0(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a result may depend on several entries of axis 0: then nothing but a
    proof says that this axis has the rows."""
    if func in _ATTENTION:
        return True
    rank = _first_tensor(args, kwargs).ndim
    if func in (torch.multinomial, torch.Tensor.multinomial):
        return rank == 1
    if func is functional.gumbel_softmax:
        return bool(_argument(args, kwargs, 4, "dim", -1) in (0, -rank))
    return False


def _dropout(
    rows: OwnRows,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """Dropout by a factor for each entry, so that only own rows are stored."""
    with torch.no_grad():
        whole = functional.dropout(_whole(input, rows).fill_(1), p, training)
        factors = _own(whole, rows)
    return input.mul_(factors) if inplace else input * factors


def _is_of_tensors(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether `torch.normal` has tensors of means or deviations."""
    values = (*args, *map(kwargs.get, ("mean", "std")))
    return func is torch.normal and any(isinstance(v, torch.Tensor) for v in values)


def _with_rows(
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
    return _SIZED[func]


def _size(func: Function, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The size, or its first number; empty for a number."""
    if "size" in kwargs:
        return kwargs["size"]
    rest = args[_position(func, args) :]
    return rest[0] if rest else ()


def _own(whole: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """A copy of own rows, so that the rest is freed."""
    return whole.narrow(0, rows.before, rows.own).clone()


def _padded(value: Any, rank: int, rows: OwnRows) -> Any:
    """A tensor of own rows with ones for the others; other values as they are."""
    if not isinstance(value, torch.Tensor) or value.ndim != rank:
        return value
    if value.ndim == 0 or len(value) != rows.own:
        return value
    whole = _whole(value, rows).fill_(1)
    before, after = rows.before, rows.total - rows.before - rows.own
    parts = [whole[:before], value, whole[len(whole) - after :]]
    return torch.cat(parts) if value.requires_grad else _filled(whole, value, rows)


def _filled(whole: torch.Tensor, value: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    whole[rows.before : rows.before + rows.own] = value
    return whole


def _whole(tensor: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """An empty tensor for all rows, with axes in memory in the same order.

    Numbers are drawn in the order of memory.
    """
    shape = (rows.total, *tensor.shape[1:])
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda i: (-strides[i], i))
    whole = torch.empty(
        [shape[i] for i in order], dtype=tensor.dtype, device=tensor.device
    )
    return whole.permute([order.index(i) for i in range(tensor.ndim)])


# Draws of a call in a proof.


@dataclass(frozen=True)
class RecordedDraw:
    """One draw, with some number of rows.

    Args:
        name: str, the function.
        shape: of the result.
        has_parameters: whether the number of numbers depends on parameters.
    """

    name: str
    shape: tuple[int, ...]
    has_parameters: bool


class DrawRecorder(TorchFunctionMode):
    """Function mode that records the draws of a call.

    Args:
        observer: its attribute `is_drawing` is True during a draw; None without one.

    Attributes:
        draws: the draws in their order.
    """

    def __init__(self, observer: Any = None) -> None:
        super().__init__()
        self._observer = observer
        self.draws: list[RecordedDraw] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        with self._observed():
            found = func(*args, **kwargs)
        first = found[0] if isinstance(found, tuple) else found
        shape = tuple(map(int, first.shape))
        self.draws.append(RecordedDraw(func.__name__, shape, func in _OF_PARAMETERS))
        return found

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        if self._observer is None:
            yield
            return
        self._observer.is_drawing = True
        try:
            yield
        finally:
            self._observer.is_drawing = False


class DrawsDiffer(Exception):
    """Why the random numbers of a call are not those of its rows."""


def multiples_of(
    counts: Sequence[int], recorded: Sequence[Sequence[RecordedDraw]]
) -> tuple[int, ...]:
    """For each draw of a call its entries for each row; see `RowProof.draws`.

    Args:
        counts: numbers of rows, not all equal.
        recorded: the draws with each of these numbers.

    Raises:
        DrawsDiffer: if there are more draws with some numbers, or a draw has rows along
            another axis or depends on parameters.
    """
    if len(set(map(len, recorded))) > 1:
        raise DrawsDiffer("how many random numbers it draws depends on the rows")
    return tuple(_multiple(counts, column) for column in zip(*recorded, strict=True))


def _multiple(counts: Sequence[int], column: Sequence[RecordedDraw]) -> int:
    first = column[0]
    shapes = [draw.shape for draw in column]
    if any(draw.name != first.name for draw in column):
        raise DrawsDiffer("which random numbers it draws depends on the rows")
    if all(shape == first.shape for shape in shapes):
        return 0
    where = f"random numbers of '{first.name}'"
    if any(shape[1:] != first.shape[1:] for shape in shapes):
        raise DrawsDiffer(f"{where} have rows along another axis than the first")
    multiple = first.shape[0] // counts[0]
    lengths = [shape[0] for shape in shapes]
    if multiple < 1 or lengths != [multiple * count for count in counts]:
        raise DrawsDiffer(f"the length of {where} is not a multiple of the rows")
    if first.has_parameters:
        raise DrawsDiffer(f"{where} depend on the parameters of rows before them")
    return multiple
