"""Position in the input of `fit`: recording, and repositioning after a restart."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keras_strategies.engines import get_engine, tf_data_pipelines
from keras_strategies.errors import CheckpointError, InputError, InvalidArgumentError
from keras_strategies.input.sources import is_tf_data
from keras_strategies.keras_compat.models import fit_position
from keras_strategies.runtime.worker_batch import WorkerBatch, WorkerRows
from keras_strategies.training.random_sync import random_numbers, set_random_numbers
from keras_strategies.training.resume.described_data import (
    check_data,
    described_data,
)
from keras_strategies.user_warnings import warn_user


def random_state() -> dict[str, Any]:
    """The random numbers of Python, NumPy, the backend, and Torch where it is used."""
    return random_numbers(get_engine())


def set_random_state(state: dict[str, Any]) -> None:
    """Restores a `random_state`."""
    set_random_numbers(get_engine(), state)


@dataclass
class Point:
    """A point between two steps.

    Args:
        epoch: int, the epoch.
        done: int, the finished steps of the epoch.
        passes: int, the finished epochs of this training.
        before: int, the batches read before the epoch.
        num_batches: int, the length of a pass; None where it is unknown.
        seed: int, for the order of shuffled arrays.
        data: what identifies the input (see `described_data`).
        random: the random numbers: at the "beginning" of training and of the "epoch",
            and "now".
    """

    epoch: int = 0
    done: int = 0
    passes: int = 0
    before: int = 0
    num_batches: int | None = None
    seed: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    random: dict[str, Any] = field(default_factory=dict)


class ShuffledBatches:
    """Batches of arrays in an order that is the same on every backend.

    The order of a pass depends on the seed and on the number of the pass, so that any
    position is reached without reading.

    Args:
        arrays: the rows.
        seed: int.
        own: the rows of this worker; None where each batch is read in full.
    """

    def __init__(
        self, arrays: fit_position.ArrayRows, seed: int, own: WorkerRows | None = None
    ):
        self._arrays = arrays
        self._own = own
        self.seed = seed
        #: Batches before the next one, of all passes.
        self.start = 0
        self.size = -(-arrays.rows // arrays.batch_size)

    def batches(self) -> Iterator[Any]:
        """A pass from the start on to its end."""
        if self._own is not None:
            return (each.batch for each in self.own_batches())
        return map(self._arrays.batch, self._orders(*divmod(self.start, self.size)))

    def own_batches(self) -> Iterator[WorkerBatch]:
        """The pass with the rows of this worker."""
        return map(self._own_batch, self._orders(*divmod(self.start, self.size)))

    def _own_batch(self, chosen: Any) -> WorkerBatch:
        assert self._own is not None

        def read(start: int, stop: int) -> Any:
            return self._arrays.batch(chosen[start:stop])

        again = functools.partial(self._own_batch, chosen)
        return dataclasses.replace(self._own.read(len(chosen), read), again=again)

    def _orders(self, number: int, first: int) -> Iterator[Any]:
        """The rows of each batch of a pass, as an array of int, from one on."""
        random = np.random.default_rng([self.seed, number])
        rows, size = self._arrays.rows, self._arrays.batch_size
        order = None if self._arrays.within_batches else random.permutation(rows)
        for i in range(self.size):
            start, stop = i * size, min((i + 1) * size, rows)
            if order is None:
                chosen = start + random.permutation(stop - start)
            else:
                chosen = order[start:stop]
            if i >= first:
                yield chosen


class InputPosition:
    """The position of `fit` in its input.

    Args:
        epochs: Keras's epoch iterator.
        stream: "skip" or "continue" for input that cannot start over; "raise" to raise
            an error for it.
        between_steps: called after each step, before the next batch is read, with the
            number of finished steps of the epoch.
        reorders: bool, whether arrays that `fit` shuffles are read in an order that is
            the same on every backend; False for Keras's order.
        own: the rows of this worker of these arrays; None to read all.

    Raises:
        ValueError: for input that cannot start over, with "raise".
    """

    def __init__(
        self,
        epochs: Any,
        stream: str,
        between_steps: Callable[[int], None],
        reorders: bool = True,
        own: WorkerRows | None = None,
    ):
        self._epochs = epochs
        self._between_steps = between_steps
        self._continues = False
        if fit_position.is_stream(epochs):
            _check_stream(stream)
            self._continues = stream == "continue"
        _warn_of_unseeded_order(fit_position.input_of(epochs))
        self._data = described_data(epochs)
        self.point = Point(seed=_seed_of_numpy(), random={"beginning": random_state()})
        self._arrived: Point | None = None
        self._read = 0
        self._shuffled: ShuffledBatches | None = None
        arrays = fit_position.shuffled_arrays(epochs) if reorders else None
        if arrays is not None:
            shuffled = self._shuffled = ShuffledBatches(arrays, self.point.seed, own)
            own_batches = None if own is None else shuffled.own_batches
            fit_position.replace_input(
                epochs, shuffled.batches, shuffled.size, own_batches
            )
        fit_position.set_position(epochs, self)

    @property
    def num_batches(self) -> int | None:
        """int, the steps of an epoch; None where it is unknown."""
        return self._epochs.num_batches  # type: ignore[no-any-return]

    @property
    def is_length_known(self) -> bool:
        """bool, whether the input says its length; Keras may count a step too many."""
        adapter = self._epochs.data_adapter
        steps = self._epochs.steps_per_epoch
        return steps is not None or adapter.num_batches is not None

    def check(self, point: Point) -> None:
        """Raises `ValueError` if a point does not fit this input."""
        check_data(point.data, self._data)
        saved, own = point.num_batches, self._epochs.num_batches
        if saved is not None and own is not None and saved != own:
            raise CheckpointError(
                f"An epoch had {saved} steps when the snapshot was made, and has {own} "
                "now. Train on the same data with the same batch size, or use another "
                "directory."
            )
        if point.done % self._epochs.steps_per_execution:
            raise CheckpointError(
                f"The snapshot was made after {point.done} steps of an epoch, which "
                "is no multiple of `steps_per_execution="
                f"{self._epochs.steps_per_execution}`. Use the value from before."
            )

    def resume(self, point: Point) -> None:
        """Makes the next epoch begin at a point."""
        self._arrived = point
        self.point = point
        if self._shuffled is not None:
            self._shuffled.seed = point.seed

    def at(self, epoch: int, done: int) -> Point:
        """The point after some steps of an epoch, with the current random numbers."""
        now = self.point
        states = {"beginning": now.random["beginning"], "now": random_state()}
        if done:
            states["epoch"] = now.random["epoch"]
        return dataclasses.replace(
            now,
            epoch=epoch,
            done=done,
            num_batches=self.num_batches,
            data=self._data,
            random=states,
        )

    def in_epoch(self, epoch: int) -> Point:
        """The point after the steps of an epoch so far, called in the next one."""
        point = self.at(epoch, self._read)
        if not self._read:
            # The order of the epoch has been drawn already.
            point.random["now"] = self.point.random["epoch"]
        return point

    def end_epoch(self) -> None:
        """Called at the end of each epoch."""
        self.point = dataclasses.replace(
            self.point,
            passes=self.point.passes + 1,
            before=self._clamped(self._read),
            random={"beginning": self.point.random["beginning"]},
        )

    def steps(self, original: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The steps of an epoch, from the resumed point on."""
        point, self._arrived = self._arrived, None
        done = 0
        if point is not None:
            done = point.done
            self._pass_finished_epochs(point)
            set_random_state(point.random["epoch" if done else "now"])
        elif self._shuffled is not None:
            self._shuffled.start = self.point.before
        self.point.random["epoch"] = random_state()
        per_call = self._epochs.steps_per_execution
        self._read = 0
        for first, last, batches in original():
            is_finished = first < done
            if not is_finished:
                yield first, last, batches
            elif self._shuffled is None and not self._continues:
                _check_count(fit_position.read_batches(batches, per_call), 1)
            self._read += per_call
            if self._shuffled is not None:
                self._shuffled.start = self._clamped(self._read)
            if not is_finished:
                self._between_steps(self._read)
            elif self._read >= done and point is not None:
                set_random_state(point.random["now"])

    def _pass_finished_epochs(self, point: Point) -> None:
        """Moves the input to the epoch of a point; arrays, to its step."""
        shares_passes = self._epochs.steps_per_epoch is not None
        if self._shuffled is not None:
            self._shuffled.start = point.before + point.done
            if shares_passes:
                seen = point.before % self._shuffled.size
                fit_position.begin_pass(self._epochs, seen)
        elif self._continues:
            return
        elif shares_passes:
            found = fit_position.skip_batches(self._epochs, point.before)
            _check_count(found, point.before)
        elif point.passes:
            set_random_state(point.random["beginning"])
            fit_position.replay_passes(self._epochs, point.passes, point.num_batches)

    def _clamped(self, read: int) -> int:
        """The batches read so far: those of a pass at most."""
        end = self.point.before + read
        if self._shuffled is None:
            return end
        size = self._shuffled.size
        return min(end, (self.point.before // size + 1) * size)


def _seed_of_numpy() -> int:
    """A seed from the state of NumPy's generator, which is not changed."""
    state: Any = np.random.get_state(legacy=False)
    key = state["state"]["key"].tobytes() + bytes(str(state["state"]["pos"]), "ascii")
    return int.from_bytes(hashlib.blake2b(key, digest_size=6).digest(), "big")


def _check_count(found: int, expected: int) -> None:
    if found < expected:
        raise InputError(
            "The input has fewer batches than were trained on when the snapshot was "
            "made. Train on the same data, or use another directory."
        )


def _check_stream(stream: str) -> None:
    if stream == "raise":
        raise InvalidArgumentError(
            "`fit` reads a Python generator, which `Resume` cannot reposition. After a "
            "restart a generator that starts over would replay batches that were "
            "trained on, and one that reads a stream would have lost those since the "
            "last snapshot. Choose: `Resume(..., stream='skip')` reads and drops as "
            "many batches as were trained on, `stream='continue'` trains on the "
            "batches that follow. Or pass arrays, a dataset or a `PyDataset`."
        )


def _warn_of_unseeded_order(dataset: Any) -> None:
    """Warns of a `tf.data` pipeline without a repeatable order."""
    if not is_tf_data(dataset):
        return
    if tf_data_pipelines().shuffles_without_seed(dataset):
        warn_user(
            "The tf.data pipeline shuffles without a seed. After a restart, rows of "
            "the unfinished epoch are replayed or skipped. Call "
            "`keras.utils.set_random_seed` before the dataset is made, or pass `seed` "
            "to `shuffle`."
        )
