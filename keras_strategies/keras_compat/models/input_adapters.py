"""Input: adapters that `fit` takes, and placement of batches on devices."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import keras
import numpy as np

from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat import patching
from keras_strategies.timeline import recording


class RowsOfWorker(NamedTuple):
    """A batch with this worker's rows, as elements of a `tf.data.Dataset`.

    Args:
        batch: the rows: `x`, or a tuple with `y` and `sample_weight`.
        every: int array, the rows of each replica, of all workers; where those of the
            global batch are split as equally as possible, an array of shape
            `(rows, 0)`, which programs can have a fixed shape of.
    """

    batch: Any
    every: Any


class OwnPart:
    """Rows that a model is built from, and facts about their batch.

    Attributes:
        batch: the rows: `x`, or a tuple with `y` and `sample_weight`.
    """

    batch: Any


class ReadBatch(OwnPart):
    """A batch of a step that may have begun.

    Args:
        batch: tuple, `x` and perhaps `y` and `sample_weight`.
        step: the step that uses it.
    """

    def __init__(self, batch: tuple[Any, ...], step: Any):
        self.batch = batch
        self.step = step


def own_part(batch: Any) -> Any:
    """The rows of a `RowsOfWorker` or an `OwnPart`; other batches unchanged."""
    return batch.batch if isinstance(batch, (RowsOfWorker, OwnPart)) else batch


def as_element(batch: Any) -> RowsOfWorker:
    """A `WorkerBatch` as an element of a `tf.data.Dataset`."""
    if batch.counts is None:
        return RowsOfWorker(batch.batch, np.asarray(batch.every, "int32"))
    return RowsOfWorker(batch.batch, np.zeros([sum(batch.every), 0], bool))


def py_dataset_batches(dataset: Any) -> Iterator[Any]:
    """One pass over a `keras.utils.PyDataset`, by its workers.

    Keras 3.15: `PyDatasetAdapter`; its `on_epoch_begin` and `on_epoch_end` start
    and stop the workers and call the dataset's methods of the same names.
    """
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    adapter = PyDatasetAdapter(dataset)
    adapter.on_epoch_begin()
    try:
        yield from adapter.get_numpy_iterator()
    finally:
        adapter.on_epoch_end()


def batches_adapter(
    batches: Callable[[], Iterator[Any]],
    num_batches: int | None,
    class_weight: dict[int, float] | None = None,
    begin: Callable[[], None] | None = None,
    *,
    can_repeat: bool = False,
    own: Callable[[], Iterator[Any]] | None = None,
) -> Any:
    """An `x` for `fit`, `evaluate` and `predict`, from a function of batches.

    Keras 3.15: `get_data_adapter` returns a `DataAdapter` as it is, without regard to
    `class_weight`; `GeneratorDataAdapter` converts an iterator for each backend,
    without a length or a second pass.

    Args:
        batches: starts a pass: an iterator of `x`, `(x, y)` or
            `(x, y, sample_weight)`.
        num_batches: int, their number; None if it is unknown.
        class_weight: dict, weights of samples by their class.
        begin: makes the iterator that the next pass reads; None for batches that a pass
            more does not change.
        can_repeat: bool, whether passes are functions of a position, so that batches
            that are read for their specification belong to no pass.
        own: starts a pass of `WorkerBatch`; then `batches` has this worker's rows
            only, and is read to build a model. None for global batches.
    """
    from keras.src.trainers.data_adapters import data_adapter_utils
    from keras.src.trainers.data_adapters.generator_data_adapter import (
        GeneratorDataAdapter,
    )

    def as_tuple(batch: Any) -> Any:
        # TensorFlow converts a list, as loaders yield it, to one array.
        return tuple(batch) if isinstance(batch, list) else batch

    def standard() -> Iterator[Any]:
        return map(as_tuple, batches())

    def weighted() -> Iterator[Any]:
        return map(with_weights, standard())

    def with_weights(batch: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        if sample_weight is not None:
            raise InvalidArgumentError(
                f"`fit` received class_weight={class_weight}, and a batch has a "
                "`sample_weight`. Only one is possible: multiply the sample "
                "weights by those of the classes in the dataset."
            )
        weights = data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
        return x, y, weights

    def weighted_rows(batch: Any) -> Any:
        batch = as_tuple(batch)
        return batch if class_weight is None else with_weights(batch)

    def own_pass() -> Iterator[Any]:
        assert own is not None
        for each in own():
            yield each.changed(weighted_rows)

    class BatchesAdapter(GeneratorDataAdapter):
        def __init__(self) -> None:
            self._output_signature = None
            # A pass of which the first batches were read for their specification.
            self._peeked: Iterator[Any] | None = None

        # Read by engines that keep rows on their workers.
        own_batches = None if own is None else staticmethod(own_pass)

        def begin(self) -> None:
            if begin is not None and self._peeked is None:
                begin()

        def generator(self) -> Iterator[Any]:
            peeked, self._peeked = self._peeked, None
            if peeked is not None:
                return peeked
            if own is not None and keras.backend.backend() == "tensorflow":
                return map(as_element, own_pass())
            return standard() if class_weight is None else weighted()

        @property
        def _first_batches(self) -> list[Any]:
            batches = self.generator()
            count = data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC
            found = list(itertools.islice(batches, count))
            if not can_repeat:
                self._peeked = itertools.chain(found, batches)
            return found

        @property
        def num_batches(self) -> int | None:
            return num_batches

    return BatchesAdapter()


def data_adapter(given: Any, class_weight: dict[int, float] | None) -> Any:
    """Keras's adapter of an `x` of `fit`, in the order of the dataset itself.

    Keras 3.15: `get_data_adapter`.
    """
    from keras.src.trainers import data_adapters

    return data_adapters.get_data_adapter(
        x=given, class_weight=class_weight, shuffle=False
    )


def unread_adapter(source: Any) -> Any:
    """An `x` for `fit` and `evaluate` that other processes read.

    Keras 3.15: on TensorFlow `TFEpochIterator` makes a dataset, which is not iterated.

    Args:
        source: in place of a pass over NumPy arrays (see `read_through`).
    """
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    class UnreadAdapter(DataAdapter):
        num_batches = None
        unread_source = source

        def get_numpy_iterator(self) -> Any:
            return source

        def get_tf_dataset(self) -> Any:
            import tensorflow as tf

            return tf.data.Dataset.range(0)

    return UnreadAdapter()


def unread_source(value: Any) -> Any:
    """The source of an adapter of `unread_adapter`; None for other values."""
    return getattr(value, "unread_source", None)


def numpy_pass(adapter: Any) -> Iterator[Any]:
    """A pass over an adapter's batches as NumPy arrays, in the order of `fit`.

    Ragged and sparse tensors of TensorFlow are yielded as they are.

    Keras 3.15: `get_numpy_iterator` of an adapter makes the iterator of a dataset when
    the first batch is read. So do the other backends' iterators; on TensorFlow `fit`
    iterates over the dataset, whose iterator is made at once.
    """
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    if keras.backend.backend() != "tensorflow":
        return adapter.get_numpy_iterator()  # type: ignore[no-any-return]
    if isinstance(adapter, TFDatasetAdapter) or _has_composites(adapter):
        return (
            keras.tree.map_structure(_to_numpy, batch, none_is_leaf=False)
            for batch in iter(adapter.get_tf_dataset())
        )
    begin = getattr(adapter, "begin", None)
    if begin is not None:
        begin()
    return adapter.get_numpy_iterator()  # type: ignore[no-any-return]


def read_through(epochs: Any, wrap: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Makes the passes of an epoch iterator those of a function.

    Keras 3.15: `EpochIterator._get_iterator` makes the iterator of a pass.

    Args:
        epochs: an epoch iterator.
        wrap: callable of an iterator of batches as NumPy arrays.
    """
    # It is called by the iterator itself.
    found: Any = weakref.proxy(epochs)
    epochs._get_iterator = lambda: wrap(numpy_pass(found.data_adapter))


def _has_composites(adapter: Any) -> bool:
    """Whether `fit` was given ragged or sparse tensors (`ArrayDataAdapter._inputs`)."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    return isinstance(adapter, ArrayDataAdapter) and any(
        map(_is_composite, keras.tree.flatten(adapter._inputs))
    )


def _is_composite(value: Any) -> bool:
    import tensorflow as tf

    return isinstance(value, (tf.RaggedTensor, tf.SparseTensor))


def _to_numpy(value: Any) -> Any:
    return value if _is_composite(value) else keras.ops.convert_to_numpy(value)


def is_adapter(value: Any) -> bool:
    """Whether a value is a data adapter, such as from `batches_adapter`."""
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    return isinstance(value, DataAdapter)


def is_array_adapter(value: Any) -> bool:
    """Whether a value is Keras's adapter of arrays."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    return type(value) is ArrayDataAdapter


def array_batches(
    adapter: Any, read: Callable[[Any, Any], Any]
) -> Iterator[Any] | None:
    """A pass over an adapter of NumPy arrays, with what `read` makes of each array.

    Keras 3.15: `ArrayDataAdapter._inputs` are the user's arrays, and `_get_iterator` is
    the loop over the batches, which draws their order.

    Args:
        adapter: Keras's adapter of the user's input.
        read: callable of an array and of the indices of a batch's rows: a slice, or an
            array of int.

    Returns:
        An iterator of batches; None for other input.
    """
    if not is_array_adapter(adapter):
        return None
    leaves = [leaf for leaf in keras.tree.flatten(adapter._inputs) if leaf is not None]
    if not all(isinstance(leaf, np.ndarray) and leaf.ndim for leaf in leaves):
        return None
    batches: Iterator[Any] = adapter._get_iterator(
        lambda leaf, indices: read(leaf, indices), adapter._inputs
    )
    return batches


def floatx_type(array: Any) -> Any:
    """The dtype to which Keras casts an array of `fit`: other floats to `floatx`.

    Keras 3.15: `convert_to_sliceable` casts, here an array without rows.
    """
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.convert_to_sliceable(array[:0], "numpy").array.dtype


def own_batches(adapter: Any) -> Iterator[Any] | None:
    """A pass over own rows of an adapter of `batches_adapter`; None if it has all."""
    begin = getattr(adapter, "own_batches", None)
    return None if begin is None else begin()


class BatchPlacer(Protocol):
    """Puts the batches of training loops on devices, on JAX."""

    #: Whether arrays of batches may be those of `unread`.
    reads_own_rows: bool

    def batches(self, batches: Iterable[Any], steps: int | None) -> Iterator[Any]:
        """The batches, each moved to the devices when it is requested.

        Args:
            batches: the batches of Keras's loop.
            steps: int, `steps_per_epoch` if it was given.
        """

    def unread(self, array: Any, indices: Any) -> Any:
        """Rows of an array that are read when they are placed.

        Args:
            array: NumPy array.
            indices: those of the rows: a slice, or an array of int.
        """


class LoaderPlacer(Protocol):
    """Puts the batches of training loops on devices, on Torch."""

    def batches(self, batches: Any, adapter: Any) -> Iterator[Any]:
        """A pass over the batches, which begins now.

        Args:
            batches: the `torch.utils.data.DataLoader`.
            adapter: Keras's adapter of the user's input.
        """


class DatasetPlacer(Protocol):
    """Prepares the datasets of training loops, on TensorFlow."""

    def dataset(
        self,
        dataset: Any,
        by_user: bool,
        begin: Callable[[], None] | None,
        of_arrays: bool,
        own: Callable[[], Iterator[Any]] | None,
        is_read_by_steps: bool,
    ) -> Any:
        """The dataset to iterate over.

        Args:
            dataset: as Keras would iterate over it.
            by_user: whether it is the user's own `tf.data.Dataset`.
            begin: called when Keras makes an iterator; None for nothing.
            of_arrays: whether Keras has made it from arrays.
            own: starts a pass with this worker's rows; None for global batches.
            is_read_by_steps: whether steps read `own`, and no thread may.
        """


class _Input(threading.local):
    # Places the batches of this thread; None leaves it to Keras.
    placer: Any = None


thread_input = _Input()


@contextlib.contextmanager
def batches_placed_by(
    placer: BatchPlacer | LoaderPlacer | DatasetPlacer | None,
) -> Iterator[None]:
    """Sets this thread's placer of batches; None leaves placement to Keras."""
    if placer is not None:
        patching.install("input")
    previous = thread_input.placer
    thread_input.placer = placer
    try:
        yield
    finally:
        thread_input.placer = previous


def torch_epoch_batches(original: Any, self: Any) -> Any:
    batches = original(self)
    placer = thread_input.placer
    # An iterator of a loader draws from Torch's random numbers when it is made, and
    # Keras makes one more than it reads.
    if placer is None:
        return batches
    return recording.reading(placer.batches(batches, self.data_adapter))


def tensorflow_epochs(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    original(self, *args, **kwargs)
    if thread_input.placer is not None:
        self._distributed_dataset = thread_input.placer.dataset(
            self._distributed_dataset,
            isinstance(self.data_adapter, TFDatasetAdapter),
            getattr(self.data_adapter, "begin", None),
            is_array_adapter(self.data_adapter),
            getattr(self.data_adapter, "own_batches", None),
            hasattr(self.data_adapter, "is_read_by_steps"),
        )
