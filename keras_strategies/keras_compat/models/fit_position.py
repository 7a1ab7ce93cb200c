"""Position of `fit` in its input, and the order of its callbacks."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras

from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.models.building import (
    build_optimizer,
    is_unbuilt,
    symbolic_build,
)
from keras_strategies.keras_compat.models.first_batches import discard_first_pass
from keras_strategies.keras_compat.models.input_adapters import (
    batches_adapter,
    own_part,
)

_POSITION = "keras_strategies_position"

#: State of Keras's callbacks: attributes by class, in Keras 3.15.
CALLBACK_STATE: dict[type, tuple[str, ...]] = {
    keras.callbacks.EarlyStopping: (
        "wait",
        "stopped_epoch",
        "best",
        "best_weights",
        "best_epoch",
    ),
    keras.callbacks.ReduceLROnPlateau: ("cooldown_counter", "wait", "best"),
    keras.callbacks.ModelCheckpoint: (
        "best",
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
    ),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
    keras.callbacks.History: ("history", "epoch"),
    keras.callbacks.CSVLogger: ("keys",),
}


class Position(Protocol):
    """Position in the input of `fit`."""

    def steps(self, original: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """The steps of an epoch: `(first step, last step, iterator of batches)`."""


class OrderedCallback(keras.callbacks.Callback):
    """A callback that runs after all others, with a companion that runs before them."""

    def companion(self) -> keras.callbacks.Callback:
        """The callback that runs before all others."""
        raise NotImplementedError

    def joined(self, others: list[Any], epochs: Any) -> None:
        """Called when `fit` has made its list of callbacks.

        Args:
            others: list of the other callbacks, `History` among them.
            epochs: the epoch iterator of `fit`; None for a list made elsewhere.
        """


class _Thread(threading.local):
    # The last epoch iterator that was reset, which `fit` does before it begins; None
    # when its callbacks have been made.
    epochs: Any = None


_thread = _Thread()


def order_callbacks() -> None:
    """Makes `fit` call an `OrderedCallback` after all others."""
    patching.install("positions")


def reset_epochs(original: Any, self: Any) -> None:
    original(self)
    _thread.epochs = weakref.ref(self)


def epoch_steps(original: Any, self: Any) -> Any:
    position: Position | None = getattr(self, _POSITION, None)
    if position is None:
        return original(self)
    return position.steps(lambda: original(self))


def callback_list_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    ordered = [c for c in self.callbacks if isinstance(c, OrderedCallback)]
    epochs = None if _thread.epochs is None else _thread.epochs()
    _thread.epochs = None
    for callback in ordered:
        others = [other for other in self.callbacks if other is not callback]
        first = callback.companion()
        first.set_model(callback.model)
        first.set_params(callback.params)
        self.callbacks = [first, *others, callback]
        callback.joined(others, epochs)


def set_position(epochs: Any, position: Position) -> None:
    """Makes an epoch iterator take its steps from a position.

    Keras 3.15: `EpochIterator._enumerate_iterator` yields them on every backend.
    """
    setattr(epochs, _POSITION, position)


def build_for_input(model: Any, epochs: Any) -> None:
    """Makes the variables of a model, its metrics and its optimizer.

    Keras 3.15 on TensorFlow: `fit` makes them in the first step, on other backends
    before its callbacks begin.
    """
    if is_unbuilt(model) and hasattr(epochs, "_distributed_dataset"):
        spec = own_part(epochs._distributed_dataset.element_spec)
        rows = keras.tree.map_structure(_some_rows, spec)
        symbolic_build(model, rows)
    build_optimizer(model)


def _some_rows(spec: Any) -> Any:
    shape = spec.shape.as_list()
    return keras.KerasTensor([2, *shape[1:]], spec.dtype.name)


def is_stream(epochs: Any) -> bool:
    """Whether `fit` reads a Python generator, which cannot start over."""
    from keras.src.trainers.data_adapters.generator_data_adapter import (
        GeneratorDataAdapter,
    )

    return type(epochs.data_adapter) is GeneratorDataAdapter


def input_of(epochs: Any) -> Any:
    """The dataset, loader or `PyDataset` that `fit` reads; its adapter for others.

    Keras 3.15: attributes of the adapters.
    """
    adapter = epochs.data_adapter
    for name in ("_dataset", "_dataloader", "py_dataset"):
        if hasattr(adapter, name):
            return getattr(adapter, name)
    return adapter


class ArrayRows:
    """The rows of arrays that `fit` shuffles.

    Args:
        epochs: the epoch iterator of `fit`.
    """

    def __init__(self, epochs: Any):
        from keras.src.trainers.data_adapters import array_slicing

        adapter = epochs.data_adapter
        self.rows = int(adapter._num_samples)
        self.batch_size = int(adapter.batch_size)
        #: Whether rows change places within their batch only.
        self.within_batches = adapter._shuffle == "batch"
        self._arrays = array_slicing.convert_to_sliceable(
            adapter._inputs, target_backend="numpy"
        )

    def batch(self, rows: Any) -> Any:
        """The batch of the rows with these numbers."""
        return keras.tree.map_structure(
            lambda array: array.convert_to_numpy(array[rows]),
            self._arrays,
            none_is_leaf=False,
        )


def arrays_of(epochs: Any) -> list[Any]:
    """The arrays that `fit` reads, as they were given; empty for other input."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    adapter = epochs.data_adapter
    if not isinstance(adapter, ArrayDataAdapter):
        return []
    return [leaf for leaf in keras.tree.flatten(adapter._inputs) if leaf is not None]


def rows_per_batch(epochs: Any) -> int | None:
    """The batch size of the input of `fit`; None where it is unknown."""
    size = getattr(epochs.data_adapter, "batch_size", None)
    return size if isinstance(size, int) else None


def shuffled_arrays(epochs: Any) -> ArrayRows | None:
    """The arrays that `fit` shuffles; None for other input.

    Keras 3.15: `ArrayDataAdapter`; its order is NumPy's on JAX, and of the
    framework's generator on Torch and TensorFlow.
    """
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    adapter = epochs.data_adapter
    if isinstance(adapter, ArrayDataAdapter) and adapter._shuffle:
        return ArrayRows(epochs)
    return None


def replace_input(
    epochs: Any,
    batches: Callable[[], Iterator[Any]],
    num_batches: int,
    own: Callable[[], Iterator[Any]] | None = None,
) -> None:
    """Makes an epoch iterator read other batches.

    Keras 3.15: its `__init__` takes an adapter, and TensorFlow's a strategy.

    Args:
        epochs: the epoch iterator of `fit`.
        batches: starts a pass.
        num_batches: int, the length of a pass.
        own: see `batches_adapter`.
    """
    arguments = {
        "x": batches_adapter(batches, num_batches, can_repeat=True, own=own),
        "steps_per_epoch": epochs.steps_per_epoch,
        "steps_per_execution": epochs.steps_per_execution,
    }
    if hasattr(epochs, "_distribute_strategy"):
        arguments["distribute_strategy"] = epochs._distribute_strategy
    discard_first_pass(epochs)
    type(epochs).__init__(epochs, **arguments)


def begin_pass(epochs: Any, seen: int) -> Any:
    """Begins the pass over the input that several epochs share.

    Keras 3.15: with `steps_per_epoch`, `_current_iterator` is read by one epoch after
    the other, of which `_steps_seen` batches have been read.
    """
    epochs._current_iterator = iter(epochs._get_iterator())
    epochs._steps_seen = seen
    return epochs._current_iterator


def replay_passes(epochs: Any, count: int, num_batches: int | None) -> None:
    """Begins and ends passes over the input, reading one batch of each.

    All batches are read where the end of a pass changes the order of the next one: of
    loaders with a generator of their own, and of `PyDataset`s with workers.

    Keras 3.15: `EpochIterator._enumerate_iterator` begins another pass after each pass
    of a known length, and discards it.

    Args:
        epochs: the epoch iterator of `fit`.
        count: int, number of passes.
        num_batches: int, the length of a pass; None if it was unknown.
    """
    adapter = epochs.data_adapter
    reads_all = getattr(adapter, "enqueuer", None) is not None
    if hasattr(adapter, "_dataloader"):
        reads_all = adapter._dataloader.generator is not None
    for _ in range(count):
        adapter.on_epoch_begin()
        length = epochs._num_batches or num_batches if reads_all else 1
        read_batches(iter(epochs._get_iterator()), length)
        if epochs._num_batches:
            epochs._current_iterator = iter(epochs._get_iterator())
        epochs._num_batches = epochs._num_batches or num_batches
        adapter.on_epoch_end()


def skip_batches(epochs: Any, count: int) -> int:
    """Reads batches of finished epochs that have shared passes.

    Returns:
        int, number of batches read.
    """
    batches = begin_pass(epochs, 0)
    for done in range(count):
        if epochs._num_batches and epochs._steps_seen >= epochs._num_batches:
            batches = begin_pass(epochs, 0)
        if next(batches, None) is None:
            return done
        epochs._steps_seen += 1
    if epochs._num_batches and epochs._steps_seen >= epochs._num_batches:
        begin_pass(epochs, 0)
    return count


def read_batches(batches: Iterator[Any], count: int | None) -> int:
    """Reads and discards batches, all for None; returns their number."""
    return sum(1 for _ in itertools.islice(batches, count))


@contextlib.contextmanager
def appending(logger: keras.callbacks.CSVLogger) -> Iterator[None]:
    """Context manager in which a logger appends to its file in any case."""
    previous = logger.append
    logger.append = True
    try:
        yield
    finally:
        logger.append = previous
