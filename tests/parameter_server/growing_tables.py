"""Streams of ids for tests of growing tables, and what such a table promises."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np

CAPACITY = 40
#: Keras on TensorFlow squares the gradients of equal ids of a batch one by one.
IS_LINEAR = keras.backend.backend() == "tensorflow"


class OneByOne:
    """What a table of ids promises, with a dict and loops."""

    def __init__(self, rows: int, candidates: int, admit: int):
        self.rows, self.candidates, self.admit = rows, candidates, admit
        self.seen: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.row: dict[int, int] = {}
        self.now = 0

    def see(self, ids) -> None:
        self.now += 1
        for each, count in Counter(ids).items():
            self.seen[each] = self.seen.get(each, 0) + count
            self.last[each] = self.now
        wanted = [i for i in set(ids) - set(self.row) if self.seen[i] >= self.admit]
        taken = set(self.row.values())
        free = [row for row in range(1, self.rows) if row not in taken]
        wanted.sort(key=lambda i: (-self.seen[i], i))
        self.row.update(zip(wanted, free, strict=False))
        waiting = sorted(
            set(self.seen) - set(self.row),
            key=lambda i: (-self.last[i], -self.seen[i], i),
        )
        if len(waiting) <= self.candidates:
            return
        for each in waiting[self.candidates - self.candidates // 4 :]:
            del self.seen[each], self.last[each]

    def expire(self, unseen, fewer_than) -> None:
        for each in list(self.seen):
            is_old = unseen is not None and self.now - self.last[each] >= unseen
            is_rare = fewer_than is not None and self.seen[each] < fewer_than
            if is_old or (is_rare and each in self.row):
                del self.seen[each], self.last[each]
                self.row.pop(each, None)


def days(kind: str):
    """Parts of a stream whose ids change, with targets."""
    random = np.random.default_rng(1)
    for day in range(5):
        ids = day * 6 + np.minimum(random.geometric(0.15, (48, 2)), 30)
        y = (ids % 7).sum(axis=1, keepdims=True).astype("float32")
        if kind == "strings":
            yield np.char.add("item ", ids.astype(str)), y
        else:
            yield ids.astype("int64") * (2**40 + 3), y
