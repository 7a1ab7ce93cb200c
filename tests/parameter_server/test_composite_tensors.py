"""Ragged and sparse tensors travel as they are: arguments, results, batches of `fit`.

As in `tf.distribute`, except that `fetch` returns a ragged tensor where `tf.distribute`
returns an object array of its rows.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]


@pytest.fixture
def coordinator(synchronous):
    return ks.ClusterCoordinator(synchronous)


@pytest.fixture
def tf(backend_name):
    if backend_name != "tensorflow":
        pytest.skip("ragged tensors are TensorFlow's")
    return pytest.importorskip("tensorflow")


def rows_of(tf):
    return tf.ragged.constant([[1.0, 2.0, 3.0], [4.0]])


def test_arguments_results_and_closures(tf, synchronous, coordinator) -> None:
    ragged = rows_of(tf)
    sparse = tf.sparse.from_dense([[0.0, 2.0], [3.0, 0.0]])
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([3, 2]))

    def call(fn, *arguments):
        return coordinator.schedule(fn, arguments).fetch(clusters.SECONDS)

    def mean(x):
        return tf.reduce_mean(x, axis=-1)

    np.testing.assert_array_equal(call(mean, ragged), [2, 4])
    np.testing.assert_array_equal(call(tf.function(mean), ragged), [2, 4])
    np.testing.assert_array_equal(call(lambda: mean(ragged)), [2, 4])
    assert call(lambda x: type(x).__name__, sparse) == "SparseTensor"
    np.testing.assert_array_equal(call(tf.sparse.reduce_sum, sparse), 5)
    for send in (call, lambda fn, x: synchronous.run(fn, (x,))):
        back = send(lambda x: {"x": x * 2}, ragged)["x"]
        assert isinstance(back, tf.RaggedTensor)
        assert back.to_list() == [[2, 4, 6], [8]]
        back = send(lambda x: x, sparse)
        assert isinstance(back, tf.SparseTensor)
        np.testing.assert_array_equal(tf.sparse.to_dense(back), [[0, 2], [3, 0]])
    back = call(lambda x: x, slices)
    assert isinstance(back, tf.IndexedSlices)
    # Programs of a step are those of any number of rows.
    for rows in ([[1.0], [2.0, 4.0], []], [[5.0, 7.0]]):
        sums = synchronous.run(
            lambda x: tf.reduce_sum(x, -1), (tf.ragged.constant(rows, tf.float32),)
        )
        np.testing.assert_array_equal(sums, [sum(row) for row in rows])


class MeanOfRows(keras.layers.Layer):
    def call(self, x):
        import tensorflow as tf

        return tf.reduce_mean(x, axis=1)[:, None]


def ragged_model():
    model = keras.Sequential([MeanOfRows(), keras.layers.Dense(1, "tanh")])
    model.layers[1].build((None, 1))
    model.layers[1].kernel.assign([[0.5]])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.nightly(unless=["tensor"])
@pytest.mark.parametrize("kind", ["tf_data", "tensor"])
def test_fit_on_ragged_rows_equals_keras(tf, synchronous, kind) -> None:
    x = tf.ragged.constant([[1.0, 2.0, 3.0], [4.0], [0.0, 6.0], [5.0], [2.0]])
    y = np.arange(5, dtype="float32")[:, None]

    def trained():
        model = ragged_model()
        if kind == "tf_data":
            data = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(2)}
            inputs = tf.data.Dataset.from_tensor_slices(x).batch(2)
        else:
            data, inputs = {"x": x, "y": y, "batch_size": 2, "shuffle": False}, x
        history = model.fit(**data, epochs=2, verbose=0).history["loss"]
        data.pop("shuffle", None)
        loss = model.evaluate(**data, verbose=0)
        return history, loss, model.predict(inputs, verbose=0), model.get_weights()

    expected = trained()
    with synchronous.scope():
        found = trained()
    for ours, theirs in zip(
        keras.tree.flatten(found), keras.tree.flatten(expected), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_fit_on_sparse_rows_equals_keras(tf, synchronous) -> None:
    x = np.eye(6, 4, dtype="float32")
    y = np.arange(6, dtype="float32")[:, None]
    seen = []

    class Checked(keras.layers.Dense):
        def call(self, inputs):
            seen.append(type(inputs).__name__)
            if not isinstance(inputs, (tf.SparseTensor, keras.KerasTensor)):
                raise TypeError(f"not sparse: {inputs}")
            return super().call(inputs)

    def trained():
        model = keras.Sequential(
            [keras.Input((4,), sparse=True), Checked(1, kernel_initializer="ones")]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
        rows = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y))
        return model.fit(rows.batch(4), epochs=2, verbose=0).history["loss"]

    expected = trained()
    with synchronous.scope():
        np.testing.assert_allclose(trained(), expected, rtol=1e-5)


def test_sparse_arrays_of_jax(backend_name, synchronous, coordinator) -> None:
    if backend_name != "jax":
        pytest.skip("BCOO arrays are JAX's")
    from jax.experimental import sparse

    x = sparse.BCOO.fromdense(np.array([[0.0, 2.0], [3.0, 0.0]], "float32"))

    def double(x):
        assert isinstance(x, sparse.BCOO), type(x)
        return x * 2

    found = coordinator.schedule(double, (x,)).fetch(clusters.SECONDS)
    for back in (found, synchronous.run(double, (x,))):
        assert isinstance(back, sparse.BCOO)
        np.testing.assert_array_equal(back.todense(), [[0, 4], [6, 0]])
