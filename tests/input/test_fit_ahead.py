"""`fit` reads a batch ahead for accelerators: several devices, in the same order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from harness.batches_ahead import prepare_ahead
from harness.strategies import STRATEGIES

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
WAIT = 60.0
ROWS = 7


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restores what `prepare_ahead` replaces."""
    if BACKEND == "torch":
        from keras_strategies.engines.torch import cuda_batches

        monkeypatch.setattr(cuda_batches, "pinned", cuda_batches.pinned)


def strategy_of(name: str, is_ahead: bool) -> ks.Strategy:
    strategy = STRATEGIES[name].make()
    if is_ahead:
        prepare_ahead(strategy)
    return strategy


def model_of(strategy: ks.Strategy, **arguments: Any) -> keras.Model:
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(4, "relu"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)
    return model


def batch(number: int) -> tuple[Any, Any]:
    x = np.random.default_rng(number).normal(size=(ROWS, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


class Source:
    """Batches, and how many were read; the last one can be an error."""

    def __init__(self, count: int, error: Exception | None = None):
        self.read = 0
        self._changed = threading.Condition()
        self._count, self._error = count, error

    def __iter__(self) -> Iterator[Any]:
        for number in range(self._count):
            with self._changed:
                self.read += 1
                self._changed.notify_all()
            yield batch(number)
        if self._error is not None:
            raise self._error

    def wait_for(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.read >= count, WAIT)

    def dataset(self) -> Any:
        """The batches as `fit` takes them."""
        if BACKEND != "tensorflow":
            return iter(self)
        import tensorflow as tf

        specs = tuple(tf.TensorSpec((None, size), "float32") for size in (3, 1))
        dataset = tf.data.Dataset.from_generator(self.__iter__, output_signature=specs)
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        return dataset.with_options(options)


@pytest.mark.one_backend("jax")
@pytest.mark.parametrize(
    ("name", "several", "stops"),
    [
        pytest.param("mirrored_2", 1, False, marks=pytest.mark.nightly),
        ("mirrored_4", 2, True),
        pytest.param("central", 1, True, marks=pytest.mark.nightly),
    ],
)
def test_training_is_the_same(name: str, several: int, stops: bool) -> None:
    """Shuffled arrays, with an early stop in the middle of an epoch."""
    x, y = (np.concatenate([batch(n)[i] for n in range(5)]) for i in (0, 1))

    def train(is_ahead: bool) -> Any:
        model = model_of(strategy_of(name, is_ahead), steps_per_execution=several)
        steps = []

        def end(step: int, logs: Any) -> None:
            del logs
            steps.append(step)
            model.stop_training = stops and len(steps) == 5

        noting = keras.callbacks.LambdaCallback(on_train_batch_end=end)
        arguments = {"batch_size": 8, "epochs": 3, "verbose": 0}
        history = model.fit(x, y, **arguments, callbacks=[noting]).history
        # Another training after it begins with the same random numbers.
        again = model.fit(x, y, **arguments).history
        weights = [weight.tolist() for weight in model.get_weights()]
        return history, again, model.evaluate(x, y, verbose=0), weights, steps

    assert train(True) == train(False)


@pytest.mark.one_backend("torch")
def test_an_error_of_the_source_is_raised_in_its_step() -> None:
    model = model_of(strategy_of("mirrored_2", is_ahead=True))
    source = Source(3, OSError("the disk is gone"))
    with pytest.raises(Exception, match="the disk is gone"):
        model.fit(source.dataset(), steps_per_epoch=5, verbose=0)
    assert int(model.optimizer.iterations) == 3
    assert np.isfinite(model.fit(*batch(0), verbose=0).history["loss"]).all()


def aligned(array: Any) -> Any:
    """A copy at an address which JAX on a CPU shares instead of copying."""
    memory = np.empty(array.nbytes + 64, "uint8")
    start = -memory.ctypes.data % 64
    found = memory[start : start + array.nbytes].view(array.dtype)
    found[:] = array.ravel()
    return found.reshape(array.shape)


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["one_device-7", "one_device-8", "mirrored_2-7"])
@pytest.mark.one_backend("jax", "torch")
@pytest.mark.skipif(BACKEND == "tensorflow", reason="tf.data copies batches")
@pytest.mark.parametrize("rows", [ROWS, 8])
@pytest.mark.parametrize("name", ["one_device", "mirrored_2"])
def test_a_source_may_write_over_its_last_batch(name: str, rows: int) -> None:
    def batches() -> Iterator[Any]:
        for number in range(8):
            x, y = batch(number)
            yield np.resize(x, (rows, 3)), np.resize(y, (rows, 1))

    def overwritten() -> Iterator[Any]:
        x, y = map(aligned, next(batches()))
        for new_x, new_y in batches():
            x[:], y[:] = new_x, new_y
            yield x, y

    # Keras reads two batches of a generator for their shapes, and trains with the
    # second one twice if they share memory.
    def fresh() -> Iterator[Any]:
        for number, found in enumerate(batches()):
            yield found if number else list(batches())[1]

    def trained(source: Iterator[Any], is_ahead: bool) -> Any:
        model = model_of(strategy_of(name, is_ahead))
        model.fit(source, steps_per_epoch=8, verbose=0)
        return [weight.tolist() for weight in model.get_weights()]

    expected = trained(fresh(), False)
    # One device of JAX does not read ahead on a CPU.
    can_be_ahead = (name, BACKEND) != ("one_device", "jax")
    for is_ahead in (False, True) if can_be_ahead else (False,):
        assert trained(overwritten(), is_ahead) == expected
