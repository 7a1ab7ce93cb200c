"""Instance keys, by which TensorFlow's workers match their collectives.

The first use of a key fixes the shape. A key therefore identifies a kind, a dtype and a
shape, and is reused for these. That is safe because a worker's collectives run one
after another: all use one resource, by which a program orders them. A shape that is
known only when a program runs gets its key from a hash table in the program.
"""

from __future__ import annotations

import hashlib
from typing import Any

import tensorflow as tf

# Smallest key from the table of shapes.
_FIRST_DYNAMIC = 2**30


class InstanceKeys:
    """The keys of a process, for all strategies with its workers.

    Shared: with separate tables, two strategies would use one key for different shapes.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], int] = {}
        self._table: Any = None

    def clear(self) -> None:
        """Removes all keys, for another group of workers."""
        self._known.clear()
        self._table = None

    def make_table(self) -> None:
        """Creates the table of shapes that are known only when a program runs."""
        if self._table is None:
            with tf.init_scope(), tf.device("/device:CPU:0"):
                self._table = tf.lookup.experimental.MutableHashTable(
                    tf.int64, tf.int32, -1
                )

    def find(self, kind: str, tensor: Any) -> Any:
        """The key of a collective.

        Args:
            kind: str, the operation, dtype and group.
            tensor: tf.Tensor.

        Returns:
            int; an integer tensor where the shape is not known yet.
        """
        if not tensor.shape.is_fully_defined():
            return self._find_in_program(kind, tensor)
        signature = (kind, *tensor.shape)
        if signature not in self._known:
            # A hash and not a counter: keys agree if one worker traces more programs.
            key = 1 + _number_of(repr(signature)) % (_FIRST_DYNAMIC - 1)
            while key in self._known.values():
                key += 1
            self._known[signature] = key
        return self._known[signature]

    def _find_in_program(self, kind: str, tensor: Any) -> Any:
        with tf.device("/device:CPU:0"):
            sizes = tf.shape(tensor, out_type=tf.int64)
            factors = [_number_of(f"axis {i}") for i in range(tensor.shape.rank)]
            signature = tf.reduce_sum(sizes * tf.constant(factors, tf.int64))
            signature += tf.constant(_number_of(kind), tf.int64)
            new = _FIRST_DYNAMIC + tf.cast(self._table.size(), tf.int32)
            key = tf.raw_ops.LookupTableFindV2(
                table_handle=self._table.resource_handle,
                keys=signature,
                default_value=new,
            )
            self._table.insert(signature, key)
            return key


def _number_of(text: str) -> int:
    """A number of 62 bits, the same in all processes."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 2
