"""Small variables that a server updates as if they were one.

What calling a program costs goes by its arguments: for biases and the like, handing
over each array takes longer than updating it. Most optimizers treat each number as if
it were alone, so that such variables, flat and one after the other, are one long one to
them. Apex and DeepSpeed keep them so on GPUs; here they are put together for an update.

Whether an optimizer is like that is asked by trying it on numbers: one that looks at a
variable's norm, at its rows, or at which variable it is, gives other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

import numpy as np

from keras_strategies.parameter_server.server.variable_store import (
    Key,
    Store,
    empty_aligned,
)

#: Bytes of an array above which a copy costs more than handing it over.
_MOST_BYTES = 65536
#: What the same arithmetic in another order may differ by in float32.
_TOLERANCE = 1e-6

#: Updates numbers by a variable's rules: its number; a value, its slots and a gradient;
#: and whether they are flat. Returns the new value and slots.
Try = Callable[[int, np.ndarray, list[np.ndarray], np.ndarray, bool], list[np.ndarray]]


class Packs:
    """Finds out which of an optimizer's variables may be updated as one.

    Args:
        slots: dict from a trained variable's number to those of its slots.
        decays: dict from a trained variable's number to whether it has weight decay.
        apart: variables that are updated by themselves.
        attempt: makes an update of numbers.
    """

    def __init__(
        self,
        slots: dict[int, tuple[int, ...]],
        decays: dict[int, bool],
        apart: Container[int],
        attempt: Try,
    ):
        self._slots = slots
        self._decays = decays
        self._apart = apart
        self._attempt = attempt
        # For each variable one by whose rules it is updated too, None for none.
        self._kinds: dict[int, int | None] = {}

    def split(
        self, store: Store, present: Sequence[tuple[Key, np.ndarray]]
    ) -> tuple[list[list[tuple[Key, np.ndarray]]], list[tuple[Key, np.ndarray]]]:
        """Puts together what may be updated as one.

        Args:
            store: has the variables and their slots.
            present: pairs of a part and its gradient.

        Returns:
            Packs of at least two such pairs, and the other pairs.
        """
        packs: dict[int, list[tuple[Key, np.ndarray]]] = {}
        for key, gradient in present:
            kind = self._kind(store, key)
            if kind is not None:
                packs.setdefault(kind, []).append((key, gradient))
        found = [pack for pack in packs.values() if len(pack) > 1]
        packed = {key for pack in found for key, _ in pack}
        return found, [pair for pair in present if pair[0] not in packed]

    def _kind(self, store: Store, key: Key) -> int | None:
        number, start = key
        if number in self._apart:
            return None
        value = store.get(key)
        kept = [store.get((slot, start)) for slot in self._slots[number]]
        if value.nbytes > _MOST_BYTES or not all(
            a.dtype == np.float32 and a.shape == value.shape for a in (value, *kept)
        ):
            return None
        if number not in self._kinds:
            self._kinds[number] = self._find_kind(number, value.shape)
        return self._kinds[number]

    def _find_kind(self, number: int, shape: tuple[int, ...]) -> int | None:
        own_numbers = self._numbers(number, shape, 1.0)
        # In a pack there are others beside it.
        others = self._numbers(number, (7,), 5.0)

        def tried(by: int, arrays: list[np.ndarray], flat: bool) -> list[np.ndarray]:
            return self._attempt(by, arrays[0], arrays[1:-1], arrays[-1], flat)

        own = tried(number, list(map(np.array, own_numbers)), False)
        known = {kind for kind in self._kinds.values() if kind is not None}
        for kind in (*sorted(known), number):
            if self._decays.get(kind) != self._decays.get(number):
                continue
            if len(self._slots[kind]) != len(self._slots[number]):
                continue
            flat = [*map(joined, zip(own_numbers, others, strict=True))]
            try:
                found = tried(kind, flat, True)
            except Exception:  # Of an optimizer that takes no vectors there.
                continue
            if all(
                np.allclose(one.reshape(-1), each[: one.size], _TOLERANCE, _TOLERANCE)
                for one, each in zip(own, found, strict=True)
            ):
                return kind
        return None

    def _numbers(
        self, number: int, shape: tuple[int, ...], scale: float
    ) -> list[np.ndarray]:
        """Numbers for a variable, its slots and a gradient."""
        random = np.random.default_rng(0)
        kept = [random.uniform(0.1, 1, shape) for _ in self._slots[number]]
        arrays = [random.normal(size=shape), *kept, random.normal(size=shape)]
        return [(scale * array).astype("float32") for array in arrays]


def joined(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Arrays one after the other, flat."""
    flat = [array.reshape(-1) for array in arrays]
    size = sum(map(len, flat))
    return np.concatenate(flat, out=empty_aligned((size,), flat[0].dtype))


def put_apart(store: Store, keys: Sequence[Key], whole: np.ndarray) -> None:
    """Gives parts what `joined` has put together."""
    end = 0
    for key in keys:
        shape = store.arrays[key].shape
        start, end = end, end + store.arrays[key].size
        store.arrays[key] = whole[start:end].reshape(shape)
