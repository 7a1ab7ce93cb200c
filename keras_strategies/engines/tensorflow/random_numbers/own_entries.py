"""Entries of a replica's rows in what one device draws for all rows.

TensorFlow's stateless numbers are functions of a key and a counter (Philox): entry i of
a tensor follows from the counter plus the number of blocks before it. Own entries
therefore cost what a draw of as many costs, and are bit for bit those of the tensor of
all rows. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

Operations that take a seed in place of a counter, and those that draw numbers until one
is accepted, draw for all rows, and the rows of the replica are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow.compat.programs import is_compiled_by_xla
from keras_strategies.errors import BatchError
from keras_strategies.runtime.random_numbers.row_draws import OwnRows

#: A function that makes a random operation, and its arguments by name.
Draw = Callable[..., Any]
Arguments = Mapping[str, Any]

_PHILOX, _AUTO_SELECT = 1, 3
_SEED = "StatelessRandomGetKeyCounter"


def own_entries(name: str, draw: Draw, given: Arguments, rows: OwnRows) -> Any:
    """What one device draws for the rows of a replica.

    Args:
        name: str, of the function.
        draw: the function.
        given: the arguments of the replica's code, with its own number of rows.
        rows: the entries of axis 0 of this replica and of all.

    Raises:
        BatchError: if the replica's code draws for another number of rows.
    """
    _check(given, rows)
    return _OWN_ENTRIES[name](draw, given, rows)


def _check(given: Arguments, rows: OwnRows) -> None:
    length = length_of(given)
    if length is not None and isinstance(rows.own, int) and length != rows.own:
        raise BatchError(
            f"Random numbers with {length} entries of axis 0 are drawn on a replica, "
            f"where the proof of the layer's row placements has {rows.own}. Its code "
            "behaves differently in two calls with the same arguments: make what "
            "changes an argument of the call or a `keras.Variable`."
        )


def length_of(given: Arguments) -> int | None:
    """The entries of axis 0 of what is drawn; None if unknown, or without axes."""
    if "logits" in given:
        shape = given["logits"].shape
        return shape[0] if shape.rank else None
    sizes = tf.get_static_value(given["shape"], partial=True)
    if sizes is None or not len(sizes) or sizes[0] is None:
        return None
    return int(sizes[0])


def rows_of_length(rows: OwnRows, length: Any) -> OwnRows:
    """The entries of a draw of which a step knows whether it is as long as the rows.

    Args:
        rows: the replica's rows.
        length: int, or integer scalar, what the replica draws.
    """
    with _scalars():
        before, own, total, length = (
            tf.cast(each, tf.int64)
            for each in (rows.before, rows.own, rows.total, length)
        )
        has_rows = length == own
        return OwnRows(
            tf.where(has_rows, before, 0), length, tf.where(has_rows, total, length)
        )


# By the counter.


def _by_counter(
    is_other_in_xla: bool = False,
) -> Callable[[Draw, Arguments, OwnRows], Any]:
    """Own entries of an operation with a key and a counter.

    A block gives 4 entries of up to 32 bits, or 2 of 64.

    Args:
        is_other_in_xla: bool, whether entries follow from the counter in another way in
            programs of XLA.
    """

    def own(draw: Draw, given: Arguments, rows: OwnRows) -> Any:
        if not _is_philox(given) or (is_other_in_xla and _is_for_xla()):
            return _of_all_rows({})(draw, given, rows)
        shape = given["shape"]
        entries = 2 if _dtype(given).size == 8 else 4
        width = _entries_of_row(shape)
        with _scalars():
            first, size = rows.before * width, rows.own * width
            block, skipped = first // entries, first % entries
            counter = _advanced(given["counter"], block)
        is_at_block = isinstance(width, int) and not width % entries
        if is_at_block or (isinstance(skipped, int) and not skipped):
            return draw(**{**given, "counter": counter})
        count = size + entries - 1
        given = {**given, "counter": counter, "shape": [count]}
        return tf.reshape(tf.slice(draw(**given), [skipped], [size]), shape)

    return own


def _advanced(counter: Any, count: Any) -> Any:
    """A counter plus a number of blocks.

    Args:
        counter: uint64 tensor of shape [2], the low word first.
        count: int, or int64 scalar.
    """
    if isinstance(count, int) and not count:
        return counter
    zero = tf.constant(0, tf.uint64)
    low = tf.cast(count, tf.uint64)
    found = counter + tf.stack([low, zero])
    if not tf.executing_eagerly() and counter.op.type == _SEED:
        return found  # Its low word is 0.
    carry = tf.cast(found[0] < counter[0], tf.uint64)
    return found + tf.stack([zero, carry])


def _is_philox(given: Arguments) -> bool:
    """Whether the algorithm is Philox, which CPUs and GPUs select."""
    return tf.get_static_value(given["alg"]) in (_PHILOX, _AUTO_SELECT)


def _is_for_xla() -> bool:
    graph = tf.compat.v1.get_default_graph()
    return not tf.executing_eagerly() and is_compiled_by_xla(graph)


def _dtype(given: Arguments) -> Any:
    limit = given.get("minval")
    return tf.as_dtype(given["dtype"] if limit is None else limit.dtype)


# From all rows.


def _of_all_rows(
    parameters: Mapping[str, float],
) -> Callable[[Draw, Arguments, OwnRows], Any]:
    """Own rows of a draw for all rows.

    Args:
        parameters: arguments that may have the rows, with a valid value for others.
    """

    def own(draw: Draw, given: Arguments, rows: OwnRows) -> Any:
        shape = given["shape"]
        rank = _rank(shape)
        every = {**given, "shape": _with_length(shape, rows.total)}
        for name, value in parameters.items():
            parameter = tf.convert_to_tensor(given[name])
            if parameter.shape.rank == rank and rank:
                every[name] = _padded(parameter, rows, value)
        return _taken(draw(**every), rows, rank)

    return own


def _choices(draw: Draw, given: Arguments, rows: OwnRows) -> Any:
    """`StatelessMultinomial(logits, num_samples, seed)`."""
    logits = tf.convert_to_tensor(given["logits"])
    every = {**given, "logits": _padded(logits, rows, 0.0)}
    return _taken(draw(**every), rows, 2)


def _padded(tensor: Any, rows: OwnRows, value: float) -> Any:
    """A tensor of own rows with other rows around; one that all rows share as it is."""
    if tensor.shape[0] == 1 and not (isinstance(rows.own, int) and rows.own == 1):
        return tensor
    with _scalars():
        after = rows.total - rows.before - rows.own
        edges = tf.pad([[rows.before, after]], [[0, tensor.shape.rank - 1], [0, 0]])
    return tf.pad(tensor, edges, constant_values=tf.cast(value, tensor.dtype))


def _taken(tensor: Any, rows: OwnRows, rank: int) -> Any:
    with _scalars():
        begin = tf.pad([rows.before], [[0, rank - 1]])
        sizes = _with_length(tf.shape(tensor), rows.own)
    return tf.slice(tensor, begin, tf.cast(sizes, begin.dtype))


# Shapes.


def _scalars() -> Any:
    """The device of shapes and counters: on a GPU each would be a transfer."""
    return tf.device("CPU:0")


def _rank(shape: Any) -> int:
    return int(tf.convert_to_tensor(shape).shape[0])


def _entries_of_row(shape: Any) -> Any:
    """Entries for each entry of axis 0: int, or an int64 scalar."""
    static = tf.get_static_value(shape, partial=True)
    if static is not None and all(size is not None for size in static[1:]):
        return int(np.prod([int(size) for size in static[1:]]))
    return tf.reduce_prod(tf.cast(shape[1:], tf.int64))


def _with_length(shape: Any, length: Any) -> Any:
    """A shape with another length of axis 0."""
    static = tf.get_static_value(shape, partial=True)
    is_known = static is not None and all(size is not None for size in static[1:])
    if is_known and isinstance(length, int):
        return [length, *(int(size) for size in static[1:])]
    shape = tf.convert_to_tensor(shape)
    return tf.concat([[tf.cast(length, shape.dtype)], shape[1:]], 0)


_OWN_ENTRIES: dict[str, Callable[[Draw, Arguments, OwnRows], Any]] = {
    "stateless_random_uniform_v2": _by_counter(),
    "stateless_random_normal_v2": _by_counter(is_other_in_xla=True),
    "stateless_truncated_normal_v2": _of_all_rows({}),
    "stateless_random_uniform_int_v2": _by_counter(),
    "stateless_random_gamma_v3": _of_all_rows({"alpha": 1.0}),
    "stateless_random_binomial": _of_all_rows({"counts": 0.0, "probs": 0.0}),
    "stateless_multinomial": _choices,
}
