"""Random numbers of a replica's rows on Torch.

A generator of Torch is a sequence: where a number stands in it depends on how many were
drawn before. There are two ways to give a row the same numbers on any number of
replicas:

- draws in blocks of rows, each with a seed of its own (`partitioned_draws.py`);
- the numbers of Keras without a strategy: a replica draws for all rows of the call, as
  one device does, and keeps those of its rows. The cost grows with the replicas.

Draws are found by a function mode, so that those of Keras and of users' code are
treated alike. Where only Keras draws, the mode is on in Keras's functions only, since
it is called for each function and attribute of tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from keras_strategies.engines.torch.replicas.draw_functions import (
    IN_PLACE,
    OF_PARAMETERS,
    SIZED,
    Function,
    first_tensor,
    is_draw,
    is_of_tensors,
    length_of,
    with_rows,
)
from keras_strategies.engines.torch.replicas.partitioned_draws import partitioned_draw
from keras_strategies.engines.torch.replicas.rows_in_memory import (
    padded_rows,
    uninitialized_rows,
)
from keras_strategies.errors import ContextError
from keras_strategies.keras_compat.backends.keras_on_torch import draws_through
from keras_strategies.runtime.data_parallel.row_draws import (
    AllRows,
    OwnRows,
    drawing,
    row_draws,
)


class RowNumbers(TorchFunctionMode):
    """Function mode of a replica: draws of `row_draws` have the numbers of its rows.

    Args:
        kinds: the kinds of the replicas' devices, such as `{"cpu"}`.
    """

    def __init__(self, kinds: Collection[str] = ()) -> None:
        super().__init__()
        self._kinds = kinds

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_draw(func, args, kwargs):
            return func(*args, **kwargs)
        draws = row_draws()
        if draws is None:
            return func(*args, **kwargs)
        if len(self._kinds) > 1:
            raise ContextError(
                f"{func.__name__!r} draws random numbers on replicas with devices of "
                f"different kinds ({', '.join(sorted(self._kinds))}), which have other "
                "generators. Give the strategy devices of one kind, or draw outside "
                "of `run` and pass the numbers as an argument."
            )
        # Also for a mode around this one.
        with drawing(None):
            if draws.is_partitioned:
                return partitioned_draw(func, args, kwargs, draws)
            rows = draws.next_draw(length_of(func, args, kwargs))
            if rows is None or rows.own == rows.total:
                return func(*args, **kwargs)
            if func in OF_PARAMETERS:
                raise ContextError(
                    f"How many random numbers {func.__name__!r} draws for a row "
                    "depends on its parameters, so a replica cannot skip those of "
                    "other rows. Make the strategy with "
                    "random_numbers='partitioned', or draw outside of `run` and pass "
                    "the numbers as an argument."
                )
            return drawn_rows(func, args, kwargs, rows)


def _drawn_by_keras(original: Any, *args: Any, **kwargs: Any) -> Any:
    """A function of `keras.random`."""
    if row_draws() is None:
        return original(*args, **kwargs)
    with RowNumbers():
        return original(*args, **kwargs)


def seeing_draws(only_of_keras: bool) -> contextlib.AbstractContextManager[Any]:
    """Context in which draws have the numbers of `row_draws`.

    Args:
        only_of_keras: whether only functions of `keras.random` draw.
    """
    return draws_through(_drawn_by_keras) if only_of_keras else RowNumbers()


@contextlib.contextmanager
def partitioned_step(only_of_keras: bool) -> Iterator[None]:
    """Context of a step, in which draws outside of layer calls are partitioned."""
    with drawing(AllRows()), seeing_draws(only_of_keras):
        yield


def drawn_rows(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], rows: OwnRows
) -> Any:
    """The entries of some rows, of what a function draws for all rows."""
    if func in SIZED and not is_of_tensors(func, args, kwargs):
        sized_args, sized = with_rows(func, args, kwargs, rows.total)
        return _own(func(*sized_args, **sized), rows)
    if func in IN_PLACE:
        whole = uninitialized_rows(args[0], rows.total)
        padded_args = [_padded(value, args[0].ndim, rows) for value in args[1:]]
        func(whole, *padded_args, **kwargs)
        with torch.no_grad():
            return args[0].copy_(whole.narrow(0, rows.before, rows.own))
    if func is functional.dropout:
        return _dropout(rows, *args, **kwargs)
    first = first_tensor(args, kwargs)
    padded = [_padded(value, first.ndim, rows) for value in args]
    named = {name: _padded(value, first.ndim, rows) for name, value in kwargs.items()}
    found = func(*padded, **named)
    if isinstance(found, tuple):
        return tuple(each if each is None else _own(each, rows) for each in found)
    return _own(found, rows)


def _dropout(
    rows: OwnRows,
    input: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    """Dropout by a factor for each entry, so that only own rows are stored."""
    with torch.no_grad():
        whole = uninitialized_rows(input, rows.total).fill_(1)
        factors = _own(functional.dropout(whole, p, training), rows)
    return input.mul_(factors) if inplace else input * factors


def _own(whole: torch.Tensor, rows: OwnRows) -> torch.Tensor:
    """A copy of own rows, so that the rest is freed."""
    return whole.narrow(0, rows.before, rows.own).clone()


def _padded(value: Any, rank: int, rows: OwnRows) -> Any:
    """A tensor of own rows with ones for the others; other values as they are."""
    if not isinstance(value, torch.Tensor) or value.ndim != rank:
        return value
    if value.ndim == 0 or len(value) != rows.own:
        return value
    return padded_rows(value, rows)
