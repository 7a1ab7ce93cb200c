"""Sources of global batches: one class for each kind of dataset."""

from __future__ import annotations

import abc
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from keras_strategies.communication.communicator import Communicator
from keras_strategies.communication.replica_counts import ReplicaCounts
from keras_strategies.errors import InputError, InvalidArgumentError
from keras_strategies.input.arrays import (
    ArrayDataset,
    Ranges,
    are_arrays,
    from_arrays,
)
from keras_strategies.input.batches import (
    check_rows,
    has_rows,
    leaf_specs,
    loaded,
    rows_of,
)
from keras_strategies.input.row_dataset import RowDataset, batches_of_worker
from keras_strategies.keras_compat.models.first_batches import is_read_for_shapes
from keras_strategies.keras_compat.models.input_adapters import (
    batches_adapter,
    py_dataset_batches,
)
from keras_strategies.runtime.row_splits import replica_ranges
from keras_strategies.values import map_structure

# The default of `Model.fit`.
_DEFAULT_BATCH_SIZE = 32


class Source(abc.ABC):
    """A restartable source of batches.

    Args:
        given: the user's dataset.
    """

    #: Whether NumPy arrays may be overwritten when the next batch is requested.
    may_reuse_memory = False
    #: Whether batches are slices of arrays in memory, for which prefetch gains nothing.
    is_in_memory = False
    #: Whether a batch is read by the thread that uses it, when it is used.
    is_read_in_turn = False
    #: Whether elements may be values without rows, each for one replica.
    may_be_values = False
    #: `batches_of` that reads this worker's rows; None where all rows are read.
    own_batches: Callable[[ReplicaCounts], Iterator[tuple[Any, Ranges]]] | None = None

    def __init__(self, given: Any):
        self.given = given
        self.what = f"The dataset, a {type(given).__name__},"
        # A pass of which `spec` has read the first batch.
        self._peeked: Iterator[Any] | None = None

    def batches(self) -> Iterator[Any]:
        """A pass over the batches, each of them checked."""
        peeked, self._peeked = self._peeked, None
        return self._checked() if peeked is None else peeked

    def _checked(self) -> Iterator[Any]:
        for i, batch in enumerate(self.read()):
            # Later batches of arrays are other rows of the same arrays.
            if not self.may_be_values and not (i and self.is_in_memory):
                check_rows(batch, self.what)
            yield batch

    @abc.abstractmethod
    def read(self) -> Iterator[Any]:
        """A pass over the batches, without checks."""

    def batches_of(self, counts: ReplicaCounts) -> Iterator[tuple[Any, Ranges]]:
        """A pass over batches with this worker's rows, or more.

        Args:
            counts: the replicas of all workers.

        Returns:
            iterator of batches, and of their rows that each local replica takes.
        """
        if self.own_batches is not None and self._peeked is None:
            yield from self.own_batches(counts)
            return
        for batch in self.batches():
            yield batch, replica_ranges(rows_of(batch), counts)

    def begin(self) -> None:  # noqa: B027 - most datasets need nothing.
        """Makes the iterator that the next pass reads, in place of an unread one.

        Keras on TensorFlow makes an iterator at the end of each epoch too, and another
        one if it begins an epoch. Iterators of `tf.data` draw the seeds of their order
        when they are made; those of other datasets are made when they are read.
        """

    @property
    def cardinality(self) -> int | None:
        """The number of batches; None where it is unknown or without end."""
        return None

    @abc.abstractmethod
    def spec(self) -> Any:
        """Shapes and dtypes, with open rows."""

    def _spec_of_first_batch(self) -> Any:
        """Those of the first batch; the next pass yields it too.

        Input may be readable only once.
        """
        batches = self.batches()
        first = list(itertools.islice(batches, 1))
        if not first:
            raise InputError(
                f"{self.what} is empty, so the structure of its batches is unknown."
            )
        self._peeked = itertools.chain(first, batches)
        return leaf_specs(first[0])

    @property
    def has_rows(self) -> bool:
        """Whether elements are batches, if that is known before they are read."""
        return True

    @abc.abstractmethod
    def model_input(self, class_weight: dict[int, float] | None = None) -> Any:
        """The input of Keras's `fit`, `evaluate` and `predict` for this source.

        Args:
            class_weight: dict, as for `fit`. Keras applies it to the user's dataset;
                adapters that are made here must apply it themselves.
        """


class TfDataSource(Source):
    """A `tf.data.Dataset`.

    Args:
        given: the dataset.
        may_be_values: bool, whether elements may be values without rows.
    """

    def __init__(self, given: Any, may_be_values: bool = False):
        super().__init__(given)
        self.may_be_values = may_be_values
        if not may_be_values:
            # Checked by its specification, before anything is read.
            check_rows(self._element_spec, self.what)
        self._begun: Iterator[Any] | None = None

    @property
    def _element_spec(self) -> Any:
        """The specification of elements, with None for what is None in each of them."""
        nothing = loaded("tensorflow").NoneTensorSpec
        return map_structure(
            lambda leaf: None if isinstance(leaf, nothing) else leaf,
            self.given.element_spec,
        )

    def read(self) -> Iterator[Any]:
        begun, self._begun = self._begun, None
        return iter(self.given) if begun is None else begun

    def begin(self) -> None:
        self._begun = iter(self.given)

    @property
    def has_rows(self) -> bool:
        return has_rows(self._element_spec)

    @property
    def cardinality(self) -> int | None:
        count = int(self.given.cardinality())
        return count if count >= 0 else None  # Negative: unknown or infinite.

    def spec(self) -> Any:
        return leaf_specs(self._element_spec)

    def model_input(self, class_weight: dict[int, float] | None = None) -> Any:
        return self.given


class LoaderSource(Source):
    """A `torch.utils.data.DataLoader`, with its workers."""

    def __init__(self, given: Any):
        super().__init__(given)
        # It imports Torch, which a loader has imported.
        from keras_strategies.loaders import loader_rows

        self._loader = loader_rows.seeded_loader(given)
        # Generators of the process are seeded for each row, from which other threads
        # may draw.
        self.is_read_in_turn = self._loader is not given
        # Processes that stay are those of the loader itself.
        if loader_rows.can_read_rows(given) and not given.persistent_workers:
            self.own_batches = functools.partial(loader_rows.batches_of_worker, given)

    def warn_of_all_rows(self, workers: Communicator) -> None:
        """Says once that each worker reads all rows, and why."""
        from keras_strategies.loaders import loader_rows

        loader_rows.warn_of_all_rows(self.given, workers)

    def read(self) -> Iterator[Any]:
        return iter(self._loader)

    @property
    def cardinality(self) -> int | None:
        return length_of(self.given)

    def spec(self) -> Any:
        from keras_strategies.loaders import loader_rows

        # As if it had not been read: one of the workers may ask alone.
        first = loader_rows.first_batch(self.given)
        if first is None:
            return self._spec_of_first_batch()
        check_rows(first, self.what)
        return leaf_specs(first)

    def model_input(self, class_weight: dict[int, float] | None = None) -> Any:
        if self._peeked is None and not is_read_for_shapes(self.given):
            return self.given
        return batches_adapter(self.batches, self.cardinality, class_weight)


class PyDatasetSource(Source):
    """A `keras.utils.PyDataset`, with its workers, its threads or processes."""

    may_reuse_memory = True

    def __init__(self, given: Any):
        super().__init__(given)
        if isinstance(given, RowDataset):
            self.own_batches = functools.partial(batches_of_worker, given)

    def read(self) -> Iterator[Any]:
        return py_dataset_batches(self.given)

    @property
    def cardinality(self) -> int | None:
        return self.given.num_batches

    def spec(self) -> Any:
        return self._spec_of_first_batch()

    def model_input(self, class_weight: dict[int, float] | None = None) -> Any:
        return self.given


class ArraySource(Source):
    """The rows of arrays, in batches."""

    is_in_memory = True

    def __init__(self, given: ArrayDataset):
        super().__init__(given)
        if given.batch_size is None:
            # Raises for scalars; other single rows look like batches.
            check_rows(next(iter(given), None), self.what)
            raise InvalidArgumentError(
                f"{self.what} yields single rows. Batch it first: "
                "`dataset.batch(global_batch_size)`."
            )
        self.own_batches = given.batches_of

    def read(self) -> Iterator[Any]:
        return iter(self.given)

    @property
    def cardinality(self) -> int | None:
        return self.given.cardinality()

    def spec(self) -> Any:
        return leaf_specs(self.given.arrays)

    def model_input(self, class_weight: dict[int, float] | None = None) -> Any:
        return batches_adapter(self.batches, self.cardinality, class_weight)


class IterableSource(Source):
    """Any iterable of batches."""

    may_reuse_memory = True

    def __init__(self, given: Iterable[Any]):
        super().__init__(given)
        # Set for an iterator, which can be read only once.
        self._remaining: Iterator[Any] | None = None
        self._is_used = False
        if isinstance(given, Iterator):
            self._remaining = given

    def read(self) -> Iterator[Any]:
        if self._remaining is None:
            return iter(self.given)
        if self._is_used:
            raise InputError(
                f"{self.what} can be iterated once and is exhausted. To iterate "
                "again, pass a list, a dataset, or an object with an `__iter__` that "
                "returns a new iterator."
            )
        self._is_used = True
        return self._remaining

    @property
    def has_rows(self) -> bool:
        # Other iterables may be readable once.
        first = self.given[:1] if isinstance(self.given, (list, tuple)) else ()
        return all(map(has_rows, first))

    @property
    def cardinality(self) -> int | None:
        return length_of(self.given)

    def spec(self) -> Any:
        if self._remaining is None:
            return self._spec_of_first_batch()
        # Read, and put back for the iteration.
        first = list(itertools.islice(self.batches(), 1))
        self._is_used = False
        self._remaining = itertools.chain(first, self._remaining)
        if not first:
            return self._spec_of_first_batch()
        return leaf_specs(first[0])

    def model_input(self, class_weight: dict[int, float] | None = None) -> Any:
        if self._remaining is None:
            return batches_adapter(self.batches, self.cardinality, class_weight)
        # Keras continues a generator in the next epoch, and so must this one.
        rest = self._remaining

        def checked() -> Iterator[Any]:
            for batch in rest:
                check_rows(batch, self.what)
                yield batch

        return checked()


class JoinedSource(Source):
    """The global batches of a dataset that has a part for each replica."""

    def __init__(
        self,
        given: Any,
        read: Callable[[], Iterator[Any]],
        cardinality: int | None,
        spec: Callable[[], Any],
        begin: Callable[[], None],
    ):
        super().__init__(given)
        self._read = read
        self._cardinality = cardinality
        self._spec = spec
        self._begin = begin

    def read(self) -> Iterator[Any]:
        return self._read()

    def begin(self) -> None:
        self._begin()

    @property
    def cardinality(self) -> int | None:
        return self._cardinality

    def spec(self) -> Any:
        return self._spec()

    def model_input(self, class_weight: dict[int, float] | None = None) -> Any:
        return batches_adapter(self.batches, self.cardinality, class_weight, self.begin)


def source_of_elements(dataset: Any) -> Source:
    """The source for a dataset of batches, or of values without rows, for replicas."""
    if is_tf_data(dataset):
        return TfDataSource(dataset, may_be_values=True)
    source = source_of(dataset)
    source.may_be_values = True
    return source


def source_of(dataset: Any, batch_size: int | None = None) -> Source:
    """The source for a dataset of any kind.

    Args:
        dataset: any kind of batched dataset, or arrays.
        batch_size: int, for arrays.

    Raises:
        ValueError: for anything else, a dataset that is not batched, or a batch size
            where there are batches already.
    """
    if are_arrays(dataset):
        return ArraySource(
            from_arrays(dataset).batch(batch_size or _DEFAULT_BATCH_SIZE)
        )
    if isinstance(dataset, ArrayDataset) and dataset.batch_size is None and batch_size:
        return ArraySource(dataset.batch(batch_size))
    if batch_size is not None:
        raise InvalidArgumentError(
            "`batch_size` is for arrays, but the dataset, a "
            f"{type(dataset).__name__}, is batched already. Omit it."
        )
    if isinstance(dataset, Source):
        return dataset
    if isinstance(dataset, ArrayDataset):
        return ArraySource(dataset)
    if isinstance(dataset, keras.utils.PyDataset):
        return PyDatasetSource(dataset)
    if is_tf_data(dataset):
        return TfDataSource(dataset)
    torch = loaded("torch")
    if torch is not None and isinstance(dataset, torch.utils.data.DataLoader):
        return LoaderSource(dataset)
    if isinstance(dataset, Iterable) and not isinstance(dataset, (str, bytes, dict)):
        return IterableSource(dataset)
    raise InvalidArgumentError(
        f"{dataset!r} (of type {type(dataset).__name__}) is not a dataset. Pass a "
        "tf.data.Dataset, a torch DataLoader, a keras.utils.PyDataset, arrays, "
        "pandas frames, or an iterable of batches."
    )


def is_tf_data(value: Any) -> bool:
    tf = loaded("tensorflow")
    return tf is not None and isinstance(value, tf.data.Dataset)


def length_of(value: Any) -> int | None:
    """The length of a dataset; None if it has none."""
    try:
        return len(value)
    except TypeError:
        return None
