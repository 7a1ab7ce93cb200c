"""Calls of the functions of `keras.random`, with the numbers of a replica's rows."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras

from keras_strategies.keras_compat.random_draws import draws_through
from keras_strategies.keras_compat.recorded_calls import unrecorded
from keras_strategies.runtime.random_numbers.row_draws import (
    OwnRows,
    RowDraws,
    drawing,
    row_draws,
)

#: Functions of which the parameters of a row decide how many numbers it takes.
_OF_PARAMETERS = ("gamma", "binomial", "beta")
_signature = functools.cache(inspect.signature)


@dataclass(frozen=True)
class KerasDraw:
    """A call of a function of `keras.random`, as Keras calls that of its backend.

    Args:
        function: the function of the backend.
        given: its arguments, by name.
    """

    function: Callable[..., Any]
    given: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def shape(self) -> Any:
        """The shape of what is drawn; `inputs` of a dropout have more entries."""
        if "shape" in self.given:
            return self.given["shape"]
        if "logits" in self.given:
            return (self.given["logits"].shape[0], self.given["num_samples"])
        if self.name == "shuffle":
            # On TensorFlow all rows have one order, else each one of its own.
            is_shared = keras.backend.backend() == "tensorflow"
            has_rows = self.given.get("axis", 0) and not is_shared
            return self.given["x"].shape if has_rows else ()
        shape = self.given["inputs"].shape
        pairs = zip(shape, self.given.get("noise_shape") or shape, strict=True)
        return [size if given is None else given for size, given in pairs]

    @property
    def length(self) -> int | None:
        """The entries of axis 0, where shapes are ints; None without axes."""
        return int(self.shape[0]) if len(self.shape) else None

    @property
    def draws_nothing(self) -> bool:
        """Whether it is a dropout of all entries or of none."""
        rate = self.given.get("rate")
        return isinstance(rate, int | float) and rate in (0, 1)

    @property
    def draws_by_parameters(self) -> bool:
        """Whether a row takes as many numbers as its parameters decide."""
        return self.name in _OF_PARAMETERS

    @property
    def has_parameters_of_rows(self) -> bool:
        """Whether parameters of other rows decide where a row's numbers are."""
        shapes = [getattr(each, "shape", None) for each in self.given.values()]
        ranks = [len(shape) for shape in shapes if shape is not None]
        return self.draws_by_parameters and len(self.shape) in ranks

    @property
    def is_unseeded_dropout(self) -> bool:
        """Whether it is a dropout that Keras on Torch leaves to Torch's generator."""
        seed = self.given.get("seed")
        if isinstance(seed, keras.random.SeedGenerator):
            seed = seed.get_config()["seed"]
        is_plain = self.given.get("noise_shape") is None
        return self.name == "dropout" and seed is None and is_plain

    def call(self, **other: Any) -> Any:
        """Calls the function, with some other arguments."""
        return self.function(**{**self.given, **other})

    def of_rows(self, total: Any, part: Callable[[Any], Any]) -> dict[str, Any]:
        """Arguments for another number of rows.

        Args:
            total: int, the entries of axis 0.
            part: returns an argument with axes for these rows.
        """
        found = dict(self.given)
        for name, value in self.given.items():
            if name in ("shape", "noise_shape") and value is not None:
                found[name] = (total, *value[1:])
            elif isinstance(value, (list, tuple)) or getattr(value, "shape", None):
                found[name] = part(keras.ops.convert_to_tensor(value))
        return found


def seeing_draws(
    draw: Callable[[KerasDraw, RowDraws], Any],
) -> contextlib.AbstractContextManager[None]:
    """Context in which functions of `keras.random` have the numbers of `row_draws`.

    Args:
        draw: draws for the rows of `RowDraws.next_draw`; always the same function of an
            engine, since the context holds for all threads.
    """
    return draws_through(_hook(draw))


@functools.cache
def _hook(draw: Callable[[KerasDraw, RowDraws], Any]) -> Callable[..., Any]:
    def drawn(original: Any, *args: Any, **kwargs: Any) -> Any:
        draws = row_draws()
        if draws is None:
            return original(*args, **kwargs)
        own = KerasDraw(original, _signature(original).bind(*args, **kwargs).arguments)
        if own.draws_nothing:
            return own.call()
        with drawing(None), unrecorded():  # Functions call each other.
            return draw(own, draws)

    return drawn


def own_of_all(
    draw: KerasDraw,
    rows: OwnRows,
    padded: Callable[[Any, OwnRows], Any],
    own: Callable[[Any, OwnRows], Any],
) -> Any:
    """The entries of a replica's rows, of what is drawn for all rows.

    Args:
        draw: the call, with the replica's number of rows.
        rows: its rows.
        padded: returns an argument for all rows, with any values for those of others.
        own: returns the entries of own rows.
    """
    given = draw.of_rows(rows.total, lambda value: padded(value, rows))
    return own(draw.function(**given), rows)
