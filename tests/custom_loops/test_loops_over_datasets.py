"""A compiled loop over each kind of dataset equals one device."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

ROWS, BATCH = 22, 8
RANDOM = np.random.default_rng(3)
X = RANDOM.normal(size=(ROWS, 4)).astype("float32")
Y = RANDOM.normal(size=(ROWS, 1)).astype("float32")


def arrays() -> Any:
    return X, Y


def tf_data() -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def loader() -> Any:
    import torch

    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(rows, batch_size=BATCH)


def train(strategy: Any, dataset: Any, **options: Any) -> list[np.ndarray]:
    with strategy.scope():
        keras.utils.set_random_seed(4)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3)

    def replica_step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            errors = ops.mean(ops.square(model(x, training=True) - y), axis=-1)
            return ks.compute_average_loss(errors)

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(loss_fn, variables)()
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @ks.function(**options)
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)))

    distributed = strategy.experimental_distribute_dataset(
        dataset, **({"batch_size": BATCH} if isinstance(dataset, tuple) else {})
    )
    losses = [float(step(*batch)) for _ in range(2) for batch in distributed]
    return [np.array(losses), *model.get_weights()]


@pytest.fixture(scope="module")
def alone() -> list[np.ndarray]:
    return train(ks.OneDeviceStrategy("cpu:0"), arrays())


def assert_alike(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


# Of tensors of each library; the same batches of each kind: `input/test_datasets.py`.
@pytest.mark.parametrize("kind", [arrays, tf_data, loader])
def test_a_loop_over_a_dataset_equals_one_device(mirrored, alone, kind):
    assert_alike(train(mirrored, kind()), alone)


def test_without_compilation(mirrored, alone):
    assert_alike(train(mirrored, arrays(), jit_compile=False), alone)


@pytest.mark.slow(seconds=9)
@pytest.mark.one_backend("torch")
@pytest.mark.skipif(keras.backend.backend() != "torch", reason="Torch only")
def test_compiled_by_torch(mirrored, alone):
    assert_alike(train(mirrored, arrays(), jit_compile=True), alone)
