"""Datasets, lookup tables and strings of TensorFlow on parameter servers."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from parameter_server import clusters

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.multiprocess
on_tensorflow = pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="strings are TensorFlow's"
)


@pytest.fixture
def batches(coordinator):
    """The batches of a worker's dataset."""

    def read(iterator):
        return [keras.ops.convert_to_numpy(batch).tolist() for batch in iterator]

    def found(dataset):
        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        return coordinator.schedule(read, (iterator,)).fetch(clusters.SECONDS)

    return found


def numbers():
    return tf.data.Dataset.range(1, 6).batch(2)


@pytest.mark.one_backend
def test_a_dataset_is_each_workers(strategy, batches) -> None:
    expected = [[1, 2], [3, 4], [5]]
    assert batches(numbers()) == expected
    assert batches(strategy.experimental_distribute_dataset(numbers())) == expected
    by_function = strategy.distribute_datasets_from_function(lambda _: numbers())
    assert batches(by_function) == expected
    captured = numbers()
    assert batches(lambda: captured.skip(1)) == expected[1:]


def test_tables_and_values_of_a_dataset_are_sent_with_it(batches) -> None:
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64)),
        -1,
    )
    words = tf.data.Dataset.from_tensor_slices(["b", "c", "a"])
    assert batches(words.map(table.lookup).batch(3)) == [[2, -1, 1]]
    assert batches(lambda: words.map(table.lookup).batch(3)) == [[2, -1, 1]]


def test_what_belongs_to_this_process_is_refused(coordinator) -> None:
    generated = tf.data.Dataset.from_generator(
        lambda: range(3), output_signature=tf.TensorSpec([], tf.int64)
    )
    with pytest.raises(ValueError, match=r"Python function.*dataset_fn"):
        coordinator.create_per_worker_dataset(generated)
    iterator = iter(numbers())
    with pytest.raises(ValueError, match="iterator of this process"):
        coordinator.schedule(next, (iterator,))
    concrete = tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([]))
    with pytest.raises(ValueError, match=r"concrete function.*get_concrete_function"):
        coordinator.schedule(concrete, (1.0,))
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 0)
    with pytest.raises(ValueError, match="create_per_worker_values"):
        coordinator.schedule(lambda: table.size())


@on_tensorflow
def test_preprocessing_layers_run_on_workers(strategy, coordinator, batches) -> None:
    with strategy.scope():
        words = keras.layers.StringLookup(vocabulary=["a", "b"])
        adapted = keras.layers.StringLookup()
        adapted.adapt(["x", "y", "x"])
        text = keras.layers.TextVectorization(output_sequence_length=3)
        text.adapt(["x y", "x z"])
        scaled = keras.layers.Normalization(axis=None)
        scaled.adapt(np.array([1.0, 3.0]))

    def dataset(values, layer):
        return tf.data.Dataset.from_tensor_slices(values).batch(3).map(layer)

    assert batches(lambda: dataset(["b", "q"], words)) == [[2, 0]]
    assert batches(lambda: dataset(["x", "y", "q"], adapted)) == [[1, 2, 0]]
    assert batches(lambda: dataset(["x y", "q"], text)) == [
        text(["x y", "q"]).numpy().tolist()
    ]
    assert batches(lambda: dataset([1.0, 3.0], scaled)) == [[-1, 1]]
    value = coordinator.schedule(lambda: text(["y x"]))
    assert value.fetch(clusters.SECONDS).tolist() == text(["y x"]).numpy().tolist()


@on_tensorflow
def test_a_model_of_strings_equals_one_device(synchronous) -> None:
    def model():
        keras.utils.set_random_seed(3)
        words = keras.Input((2,), dtype="string")
        found = keras.layers.StringLookup(vocabulary=["a", "b", "c"])(words)
        rows = keras.layers.Embedding(4, 3)(found)
        out = keras.layers.Dense(1)(keras.layers.Flatten()(rows))
        made = keras.Model(words, out)
        made.compile("sgd", "mse")
        return made

    def trained(made):
        x = tf.constant([["a", "b"], ["c", "q"], ["b", "b"], ["q", "a"], ["c", "c"]])
        data = tf.data.Dataset.from_tensor_slices((x, np.arange(5.0)[:, None])).batch(2)
        losses = made.fit(data, epochs=2, verbose=0).history["loss"]
        loss = made.train_on_batch(x, np.ones((5, 1)))
        return [*losses, loss, made.evaluate(data, verbose=0)], made.predict(
            x, verbose=0
        )

    expected_losses, expected = trained(model())
    with synchronous.scope():
        made = model()
    losses, found = trained(made)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@on_tensorflow
def test_a_model_without_compile_predicts_strings(synchronous) -> None:
    with synchronous.scope():
        inverse = keras.layers.StringLookup(vocabulary=["x", "y"], invert=True)
        model = keras.Sequential([keras.Input((1,), dtype="int64"), inverse])
    found = model.predict(np.array([[1], [2]]), verbose=0)
    assert found.tolist() == [[b"x"], [b"y"]]


@on_tensorflow
def test_methods_of_modules_are_scheduled(strategy, coordinator) -> None:
    class Counter(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.total = keras.Variable(2.0, trainable=False)

        @tf.function
        def scaled(self, x):
            return 10.0 * x

        @tf.function
        def step(self, x):
            self.total.assign_add(x)
            return self.scaled(self.total.value)

    with strategy.scope():
        counter = Counter()
    definitions = strategy.functions._definitions
    found = []
    for _ in range(2):
        value = coordinator.schedule(counter.step, (1.0,))
        found.append(float(value.fetch(clusters.SECONDS)))
        sent = len(definitions)
    assert found == [30.0, 40.0]
    assert float(counter.total.numpy()) == 4.0
    coordinator.schedule(counter.step, (1.0,)).fetch(clusters.SECONDS)
    # The method is sent once.
    assert len(definitions) == sent
