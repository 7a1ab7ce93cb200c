"""Position in each kind of input, after an interruption in the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
from harness.training import assert_arrays

import keras_strategies as ks
from keras_strategies.training.resume.snapshot_writer import SnapshotWriter

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
ROWS = 22
RNG = np.random.default_rng(3)
X = RNG.normal(size=(ROWS, 3)).astype("float32")
Y = (X @ np.array([[1.0], [-2.0], [0.5]])).astype("float32")


class Interrupted(Exception):
    """An interruption of training."""


class Interruption(keras.callbacks.Callback):
    """Ends training after a number of steps; 0 for none."""

    def __init__(self, after: int):
        super().__init__()
        self.left = after
        self.steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == self.left:
            raise Interrupted


def model_of(steps_per_execution: int = 1) -> Any:
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05, momentum=0.5)
    model.compile(optimizer, "mse", steps_per_execution=steps_per_execution)
    return model


def fit(
    folder: Path,
    data: Any,
    after: int = 0,
    steps_per_execution: int = 1,
    stream: Any = "raise",
    callbacks: tuple[Any, ...] = (),
    **options: Any,
) -> tuple[list[Any], dict[str, list[float]], int]:
    """Trains until an interruption or to the end."""
    model = model_of(steps_per_execution)
    interruption = Interruption(after)
    resume = ks.callbacks.Resume(folder, every_steps=1, stream=stream)
    arguments = data() if callable(data) else data
    arguments = arguments if isinstance(arguments, dict) else {"x": arguments}
    try:
        # Each snapshot waits for the one before, so that steps are lost by rule.
        with mock.patch.object(SnapshotWriter, "is_busy", False):
            given = [resume, *callbacks, interruption]
            options |= {"verbose": 0, "callbacks": given}
            history = model.fit(**arguments, **options).history
    except Interrupted:
        history = {}
    finally:
        resume.wait()
    return model.get_weights(), history, interruption.steps


def assert_resumed(folder: Path, data: Any, after: int = 8, **options: Any) -> None:
    """Fails if an interrupted training ends as another than one without."""
    expected, whole, steps = fit(folder / "whole", data, **options)
    fit(folder / "interrupted", data, after, **options)
    found, history, rest = fit(folder / "interrupted", data, **options)
    # A snapshot is written when the step after it has been taken.
    assert rest in (steps - after + 1, steps - after + 2)
    assert history.keys() == whole.keys()
    for name, values in whole.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    assert_arrays(found, expected, 1e-5, 1e-6)


def arrays() -> dict[str, Any]:
    return {"x": X, "y": Y, "batch_size": 5}


class ShuffledRows(keras.utils.PyDataset):
    """Rows in an order that changes from epoch to epoch, as in Keras's guides."""

    order = np.arange(ROWS)

    def __init__(self) -> None:
        super().__init__()
        self.order = self.order.copy()

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        rows = self.order[index * 5 : (index + 1) * 5]
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class RowsByWorkers(ShuffledRows):
    """Rows that two threads read."""

    def __init__(self) -> None:
        super().__init__()
        self.workers = 2

    def on_epoch_end(self) -> None:
        """Leaves the order: Keras also calls it in a thread."""


def tf_data(repeat: bool = False) -> Any:
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS, seed=4)
    dataset = dataset.batch(5)
    return dataset.repeat() if repeat else dataset


def loader(seed: int | None) -> Any:
    import torch

    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    own = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(rows, batch_size=5, shuffle=True, generator=own)


def augmenting_loader(shuffle: bool) -> Any:
    import torch

    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, i: int) -> Any:
            noise = np.random.rand() + float(torch.rand(()))
            return X[i] + np.float32(noise), Y[i]

    return torch.utils.data.DataLoader(Noisy(), batch_size=5, shuffle=shuffle)


def batches() -> list[tuple[Any, Any]]:
    return [(X[i : i + 5], Y[i : i + 5]) for i in range(0, ROWS, 5)]


class Restarting:
    """An iterable without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches())


def own_dataset() -> Any:
    strategy = ks.OneDeviceStrategy("cpu:0")
    dataset = strategy.make_experimental_numpy_dataset((X, Y))
    return strategy.experimental_distribute_dataset(dataset.shuffle(ROWS).batch(5))


INPUT: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "arrays": (arrays, {}),
    "arrays in order": (arrays, {"shuffle": False}),
    "arrays in batches": (arrays, {"shuffle": "batch"}),
    "arrays in short epochs": (arrays, {"steps_per_epoch": 2}),
    "class weights": (
        lambda: {"x": X, "y": (Y > 0).astype("int32")[:, 0], "batch_size": 5},
        {"class_weight": {0: 1.0, 1: 3.0}},
    ),
    "PyDataset": (ShuffledRows, {"shuffle": True}),
    "PyDataset with workers": (RowsByWorkers, {"shuffle": False}),
    "list": (lambda: _distributed(batches()), {}),
    "unknown length": (lambda: _distributed(Restarting()), {}),
}
if BACKEND == "torch":
    INPUT["loader"] = (lambda: loader(4), {})
    INPUT["loader with global numbers"] = (lambda: loader(None), {})
if BACKEND == "tensorflow":
    INPUT["tf.data"] = (tf_data, {})
    INPUT["tf.data in short epochs"] = (lambda: tf_data(True), {"steps_per_epoch": 4})
else:
    INPUT["dataset of the strategy"] = (own_dataset, {})


def _distributed(dataset: Any) -> Any:
    strategy = ks.OneDeviceStrategy("cpu:0")
    return strategy.experimental_distribute_dataset(dataset)


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["arrays in short epochs", "unknown length"])
@pytest.mark.parametrize("kind", INPUT)
def test_input_continues_where_it_was(kind: str, tmp_path: Path) -> None:
    data, options = INPUT[kind]
    epochs = 6 if "short" in kind else 4
    assert_resumed(tmp_path, data, epochs=epochs, **options)


@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_of_a_loader_are_augmented_as_without_an_interruption(
    shuffle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = model_of

    def of_strategy(*arguments: Any) -> Any:
        if BACKEND != "torch":
            # Keras seeds it on Torch only.
            import torch

            torch.manual_seed(7)
        with ks.OneDeviceStrategy("cpu:0").scope():
            return original(*arguments)

    monkeypatch.setitem(globals(), "model_of", of_strategy)
    assert_resumed(tmp_path, lambda: augmenting_loader(shuffle), epochs=4)


@pytest.mark.parametrize("options", [{"after": 11}, {"initial_epoch": 2, "epochs": 6}])
def test_interruptions_after_an_epoch_and_a_first_one(tmp_path: Path, options) -> None:
    assert_resumed(tmp_path, arrays, **{"epochs": 4, **options})


@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.skipif(BACKEND == "torch", reason="Keras takes single steps on Torch")
def test_several_steps_in_one_execution(tmp_path: Path) -> None:
    options = {"steps_per_execution": 2, "epochs": 4}
    assert_resumed(tmp_path, arrays, after=4, **options)
    fit(tmp_path / "other", arrays, after=3, **options)
    with pytest.raises(ValueError, match=r"no multiple of `steps_per_execution=4`"):
        fit(tmp_path / "other", arrays, steps_per_execution=4, epochs=4)


def generator() -> Iterator[Any]:
    while True:
        yield from batches()


def test_a_generator_needs_a_choice(tmp_path: Path) -> None:
    message = "cannot reposition.*would replay.*stream='skip'.*stream='continue'"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, generator, epochs=2, steps_per_epoch=3)
    options = {"epochs": 6, "steps_per_epoch": 3, "stream": "skip", "after": 8}
    assert_resumed(tmp_path, generator, **options)


def test_a_stream_is_continued(tmp_path: Path) -> None:
    read = 0

    def stream() -> Iterator[Any]:
        nonlocal read
        for batch in generator():
            read += 1
            yield batch

    options = {"epochs": 4, "steps_per_epoch": 3, "stream": "continue"}
    fit(tmp_path, stream, after=8, **options)
    read = 0
    *_, steps = fit(tmp_path, stream, **options)
    # Keras reads two batches to know their shapes, TensorFlow some ahead.
    assert steps < 8
    assert BACKEND == "tensorflow" or read <= steps + 2


@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="imports TensorFlow")
def test_an_order_without_a_seed_is_a_warning(tmp_path: Path) -> None:
    import tensorflow as tf

    tf.random.set_seed(None)
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(5)
    with pytest.warns(UserWarning, match="shuffles without a seed"):
        fit(tmp_path, dataset)
