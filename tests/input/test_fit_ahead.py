"""`fit` reads a batch ahead for accelerators: several devices, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from harness.batches_ahead import prepare_ahead
from harness.strategies import STRATEGIES

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
ROWS = 7


def batch(number: int, rows: int = ROWS) -> tuple[Any, Any]:
    x = np.random.default_rng(number).normal(size=(ROWS, 3)).astype("float32")
    return np.resize(x, (rows, 3)), np.resize(x.sum(1), (rows, 1))


class Trained:
    """A model under a strategy that prepares batches ahead, or not."""

    def __init__(self, name: str, is_ahead: bool, **arguments: Any):
        strategy = STRATEGIES[name].make()
        self.end = prepare_ahead(strategy) if is_ahead else lambda: None
        keras.utils.set_random_seed(2)
        with strategy.scope():
            hidden = [keras.layers.Dense(4, "relu"), keras.layers.Dropout(0.2)]
            layers = [keras.Input((3,)), *hidden, keras.layers.Dense(1)]
            self.model = keras.Sequential(layers)
            self.model.compile(keras.optimizers.SGD(0.1), "mse", **arguments)

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *exception: Any) -> None:
        self.end()


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["mirrored_4-2-True"])
@pytest.mark.parametrize(
    ("name", "several", "stops"),
    [("mirrored_2", 1, False), ("mirrored_4", 2, True), ("central", 1, True)],
)
def test_training_is_the_same(name: str, several: int, stops: bool) -> None:
    """Shuffled arrays, with an early stop in the middle of an epoch."""
    x, y = (np.concatenate([batch(n)[i] for n in range(5)]) for i in (0, 1))
    arguments = {"batch_size": 8, "epochs": 3, "verbose": 0}

    def train(is_ahead: bool) -> Any:
        with Trained(name, is_ahead, steps_per_execution=several) as model:
            steps = []

            def end(step: int, logs: Any) -> None:
                steps.append(step)
                model.stop_training = stops and len(steps) == 5

            noting = keras.callbacks.LambdaCallback(on_train_batch_end=end)
            history = model.fit(x, y, **arguments, callbacks=[noting]).history
            # Another training after it begins with the same random numbers.
            again = model.fit(x, y, **arguments).history
            weights = [weight.tolist() for weight in model.get_weights()]
            return history, again, model.evaluate(x, y, verbose=0), weights, steps

    assert train(True) == train(False)


@pytest.mark.one_backend("torch")
@pytest.mark.skipif(BACKEND == "tensorflow", reason="its input is tf.data")
def test_an_error_of_the_source_is_raised_in_its_step() -> None:
    def failing() -> Iterator[Any]:
        yield from map(batch, range(3))
        raise OSError("the disk is gone")

    with Trained("mirrored_2", True) as model:
        with pytest.raises(OSError, match="the disk is gone"):
            model.fit(failing(), steps_per_epoch=5, verbose=0)
        assert int(model.optimizer.iterations) == 3
        assert np.isfinite(model.fit(*batch(0), verbose=0).history["loss"]).all()


def aligned(array: Any) -> Any:
    """A copy at an address which JAX on a CPU shares instead of copying."""
    memory = np.empty(array.nbytes + 64, "uint8")
    start = -memory.ctypes.data % 64
    found = memory[start : start + array.nbytes].view(array.dtype)
    found[:] = array.ravel()
    return found.reshape(array.shape)


@pytest.mark.one_backend("jax", "torch")
@pytest.mark.nightly(unless=["one_device-7", "one_device-8", "mirrored_2-7"])
@pytest.mark.skipif(BACKEND == "tensorflow", reason="tf.data copies batches")
@pytest.mark.parametrize("rows", [ROWS, 8])
@pytest.mark.parametrize("name", ["one_device", "mirrored_2"])
def test_a_source_may_write_over_its_last_batch(name: str, rows: int) -> None:
    def overwritten() -> Iterator[Any]:
        x, y = map(aligned, batch(0, rows))
        for number in range(8):
            x[:], y[:] = batch(number, rows)
            yield x, y

    # Keras reads two batches of a generator for their shapes, and trains with the
    # second one twice if they share memory.
    def fresh() -> Iterator[Any]:
        return (batch(number, rows) for number in (1, *range(1, 8)))

    def trained(source: Iterator[Any], is_ahead: bool) -> Any:
        with Trained(name, is_ahead) as model:
            model.fit(source, steps_per_epoch=8, verbose=0)
            return [weight.tolist() for weight in model.get_weights()]

    expected = trained(fresh(), False)
    # One device of JAX does not read ahead on a CPU.
    can_be_ahead = (name, BACKEND) != ("one_device", "jax")
    for is_ahead in (False, True) if can_be_ahead else (False,):
        assert trained(overwritten(), is_ahead) == expected
