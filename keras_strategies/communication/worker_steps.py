"""Steps of a model's method on several workers: progress, and equal batches."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import keras
import numpy as np

from keras_strategies.communication.checksums import checksum
from keras_strategies.errors import WorkerError
from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.timeline import recording
from keras_strategies.user_warnings import warn_user

if TYPE_CHECKING:
    from keras_strategies.cluster.group import WorkerGroup


Found = TypeVar("Found")
# Number of first batches of a loop that workers compare by content.
_COMPARED_BATCHES = 2
#: In place of the facts of a batch, where the data have ended.
END = "end"

# The end of errors about different data.
SAME_DATA = (
    "All workers must read the same global batches. Check first that there is a seed: "
    "call `keras.utils.set_random_seed(0)` on all workers before data is made, "
    "shuffled or augmented at random. For separate data per worker, use "
    "ks.DatasetCreator or `strategy.distribute_datasets_from_function`."
)
_ARGUMENTS = ("x", "y", "sample_weight")


def _names(batch: Any) -> list[str]:
    """The leaves of a batch that are not None, as `x['left']`, in their order."""
    names = []
    for path, leaf in keras.tree.flatten_with_path(batch):
        if leaf is not None:
            first, *rest = (0, *path) if not isinstance(batch, (tuple, list)) else path
            names.append(
                _ARGUMENTS[min(first, 2)] + "".join(f"[{key!r}]" for key in rest)
            )
    return names


def _checksum(leaf: Any) -> int:
    array = leaf
    if not isinstance(leaf, np.ndarray):
        array = keras.ops.convert_to_numpy(leaf)
    return checksum(array)


def _compare_rows(rows: int, found: list[int]) -> None:
    if any(each != rows for each in found):
        raise WorkerError(
            "Workers have different batches: the numbers of rows are "
            f"{found}. All workers must read the same global batches."
        )


def chiefs_seed(group: WorkerGroup, own: int, stream: str = "") -> int:
    """The chief's seed of the random numbers of rows, once for each pass.

    Args:
        group: the connected workers.
        own: int, the seed of this worker.
        stream: str, see `WorkerGroup.gather_values`.
    """
    seed: int = group.gather_values("the seed of a pass", own, stream)[0]
    return seed


def compare_orders(
    group: WorkerGroup, rows: int, order: int, stream: str = ""
) -> Callable[[], None]:
    """Begins to compare the rows of a `DataLoader`'s global batch with those of others.

    Args:
        group: the connected workers.
        rows: int, those of all workers; 0 at the end of the data.
        order: int, a checksum of their numbers in the dataset.
        stream: str, see `WorkerGroup.gather_values`.

    Returns:
        A callable that waits for the others. It raises `WorkerError` if they have other
        rows, or one has no more batches.
    """

    def compare(found: list[Any]) -> None:
        for other, each in enumerate(found):
            if each != [rows, order]:
                raise _different_orders(group, other, rows, each[0])

    return begin_comparison(group, [rows, order], compare, stream)


def begin_comparison(
    group: WorkerGroup,
    facts: Any,
    compare: Callable[[list[Any]], None],
    stream: str = "",
) -> Callable[[], None]:
    """Begins to compare facts of a batch with those of other workers.

    Args:
        group: the connected workers.
        facts: JSON value of a batch; `END` where there is none.
        compare: called with the facts of all workers, by worker; raises `WorkerError`.
        stream: str, see `WorkerGroup.gather_values`.

    Returns:
        A callable that waits for the others, and compares.
    """
    gathered = group.begin_gather("a batch", facts, stream)

    def finish() -> None:
        found = gathered()
        ended = [worker for worker, each in enumerate(found) if each == END]
        if 0 < len(ended) < len(found):
            other = next(w for w, each in enumerate(found) if each != END)
            raise WorkerError(
                f"Worker {ended[0]} has no more batches at {group.progress}, but "
                f"worker {other} has. {SAME_DATA}"
            )
        if not ended:
            compare(found)

    return finish


def _different_orders(
    group: WorkerGroup, other: int, rows: int, others: int
) -> WorkerError:
    # A loop of the user has no steps that are counted.
    place = f" at {group.progress}" if group.progress else ""
    return WorkerError(
        f"Workers {group.index} and {other} have different batches{place}, of {rows} "
        f"and {others} rows of their DataLoaders. All workers must read the same "
        "global batches in the same order: seed the loader's `generator`, or call "
        "`torch.manual_seed` on all of them before each pass; "
        "remove a `DistributedSampler`; for separate data per worker, use "
        "ks.DatasetCreator or `strategy.distribute_datasets_from_function`."
    )


class WorkerSteps:
    """The steps of a method on one worker.

    `check_rows` and `check_batch` send what is compared, while the step begins or, in
    `for_later`, the one before it; `await_checks` waits, before the first collective of
    the step.

    Args:
        group: the connected workers.
    """

    def __init__(self, group: WorkerGroup):
        self.group = group
        self._method = ""
        #: int, the steps of the method that have begun.
        self.count = 0
        # What is compared: "batches", "rows" or nothing.
        self._checks = ""
        # Wait for comparisons that have begun.
        self._begun: list[Callable[[], None]] = []
        self._awaiting = threading.Lock()
        # Host and process id of workers that have been warned about.
        self._slow: set[tuple[str, int]] = set()
        self._seen_times: tuple[Any, ...] = ()

    @contextlib.contextmanager
    def method(self, name: str) -> Iterator[bool]:
        """Context manager for a method of a model; counts its steps.

        Returns:
            Whether no other method is under way.
        """
        previous = self._method, self.count, self._checks
        checks = "batches" if name.endswith("_on_batch") else ""
        self._method, self.count, self._checks = name, 0, checks
        self.group.progress = f"the beginning of {name}"
        self.group.clock.end()
        is_outermost = not previous[0]
        call = self.group.call() if is_outermost else contextlib.nullcontext()
        try:
            with call:
                yield is_outermost
        finally:
            self._method, self.count, self._checks = previous
            self.group.progress = self._progress()
            self.group.clock.end()

    def begin_steps(self, count: int = 1) -> None:
        """Starts one or more steps.

        Raises:
            WorkerError: if a worker is lost.
        """
        self.count += count
        self.group.count_steps(count)
        self.group.progress = self._progress()
        self.group.check()
        self._warn_of_slow_workers()
        self.group.clock.begin(count)

    def next_batch(self, batches: Iterator[Any]) -> Any:
        """Starts a step, and reads its batch.

        Raises:
            StopIteration: at the end of the data; no step is started then.
            WorkerError: if a worker is lost.
        """
        self.begin_steps()
        try:
            with self.group.clock.reading(), recording.DATA:
                return next(batches)
        except StopIteration:
            self.count -= 1
            self.group.count_steps(-1)
            self.group.progress = self._progress()
            self.group.clock.cancel()
            raise

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches; the time of reading them is measured for `strategy.status`."""
        iterator = iter(batches)
        end = object()
        while True:
            with self.group.clock.reading(), recording.DATA:
                batch = next(iterator, end)
            if batch is end:
                return
            yield batch

    def _warn_of_slow_workers(self) -> None:
        """Warns of a worker that the others wait for, once, on the chief."""
        if not self.group.is_chief or self.group.times is self._seen_times:
            return
        self._seen_times = self.group.times
        for index in self.group.slow_workers():
            member = self.group.members[index]
            place = str(member["host"]), int(member["pid"])
            if place not in self._slow:
                self._slow.add(place)
                warn_user(
                    f"Worker {index} ({place[0]}, process {place[1]}) delays the "
                    f"others in every step.{self.group.lateness(index)} Look for "
                    "other programs on its machine, slow input or fewer devices; "
                    "`strategy.status()` has the times of all workers."
                )

    def follow(self, group: WorkerGroup) -> None:
        """Takes the steps that follow with another group."""
        self.group = group
        self._begun.clear()

    def await_checks(self) -> None:
        """Waits until all workers have the batches that were compared here.

        Raises:
            WorkerError: if they differ, or a worker has no more.
        """
        if not self._begun:
            return
        # Torch has collectives on several threads.
        with self._awaiting:
            try:
                while self._begun:
                    self._begun[0]()
                    del self._begun[0]
            except BaseException:
                self._begun.clear()
                raise

    def for_later(self, begin: Callable[[], Found]) -> Callable[[], Found]:
        """Begins comparisons that a later step awaits.

        Args:
            begin: begins them.

        Returns:
            A callable that gives them to the step which calls it, and returns what
            `begin` has returned.
        """
        count = len(self._begun)
        found = begin()
        begun = self._begun[count:]
        del self._begun[count:]

        def arrived() -> Found:
            self._begun += begun
            return found

        return arrived

    @property
    def compares(self) -> bool:
        """bool, whether the batches of the method are compared."""
        return bool(self._checks)

    def check(self, what: str) -> None:
        """Sets what is compared until the method ends.

        Args:
            what: "batches", by `check_batch`; "rows", by `check_rows`; or "".
        """
        self._checks = what

    def check_rows(self, rows: int, order: tuple[int, int] | None = None) -> None:
        """Begins to compare a global batch of which each worker has its own rows.

        Args:
            rows: int, those of all workers.
            order: pair of int, see `WorkerBatch`; None to compare the rows alone.
        """
        if order is not None:
            self._begun.append(compare_orders(self.group, *order))
        elif self._checks == "rows":
            self._begin_comparison(rows, functools.partial(_compare_rows, rows))

    def check_batch(self, batch: Any) -> None:
        """Begins to compare a global batch with those of the other workers.

        Arrays are compared once, before the loop. Other input, such as a generator or a
        `PyDataset`, may end or shuffle differently: shapes of every batch are compared,
        and contents of the first ones.
        """
        if self._checks != "batches":
            return
        leaves = [leaf for leaf in leaves_of(batch) if leaf is not None]
        facts: list[Any] = [[list(leaf.shape) for leaf in leaves]]
        names: list[str] = []
        if self.count <= _COMPARED_BATCHES:
            facts.append([_checksum(leaf) for leaf in leaves])
            names = _names(batch)
        self._begin_comparison(facts, functools.partial(self._compare, names, facts))

    def check_end(self) -> None:
        """Begins to compare the end of the data."""
        if self._checks:
            self._begin_comparison(END, lambda found: None)

    def _begin_comparison(
        self, facts: Any, compare: Callable[[list[Any]], None]
    ) -> None:
        self._begun.append(begin_comparison(self.group, facts, compare))

    def _compare(self, names: list[str], facts: list[Any], found: list[Any]) -> None:
        for other, each in enumerate(found):
            if each[0] != facts[0]:
                raise WorkerError(
                    f"Workers have different batches at {self.group.progress}: "
                    f"worker {self.group.index} has shapes {facts[0]}, worker "
                    f"{other} has {each[0]}. All workers must read the same global "
                    "batches; for separate data per worker, use ks.DatasetCreator "
                    "or `strategy.distribute_datasets_from_function`."
                )
            if each != facts:
                differ = [a != b for a, b in zip(each[-1], facts[-1], strict=True)]
                name = next(itertools.compress(names, differ))
                raise WorkerError(
                    f"Workers {self.group.index} and {other} have batches of the "
                    f"same shapes but different contents at {self.group.progress}, "
                    f"first in `{name}`. {SAME_DATA}"
                )

    def _progress(self) -> str:
        if not self._method:
            return ""
        return f"step {self.count} of {self._method}"
