"""Variables and models outside of scheduled functions."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_strategies as ks
from parameter_server import clusters

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]
BACKEND = keras.backend.backend()


@pytest.fixture(scope="module")
def table(synchronous):
    """Ten rows in two parts."""
    with synchronous.scope():
        return keras.Variable(np.arange(20.0).reshape(10, 2), dtype="float32")


@pytest.fixture(scope="module")
def model(synchronous):
    with synchronous.scope():
        return clusters.two_inputs(keras.optimizers.SGD(0.1, momentum=0.5))


def squares(table, ids):
    """The loss of some rows."""
    return lambda: keras.ops.sum(keras.ops.take(table, ids, axis=0) ** 2)


def test_a_partitioned_variable_and_its_parts(synchronous, table) -> None:
    assert isinstance(table, ks.ShardedVariable) and isinstance(table, keras.Variable)
    assert [part.shape for part in table.variables] == [(5, 2), (5, 2)]
    devices = [f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in (0, 1)]
    assert sorted(part.device for part in table.variables) == devices
    assert synchronous.extended.parameter_devices == tuple(devices)
    assert len(synchronous.extended.worker_devices) == 1
    expected = np.arange(20.0).reshape(10, 2)
    parts = [part.numpy() for part in table.variables]
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    np.testing.assert_array_equal(np.asarray(table), expected)
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(table)), expected
    )
    for index in (slice(3, 7), slice(None, None, 2), -1, (slice(4, 6), 1), [0, 9]):
        found = keras.ops.convert_to_numpy(table[index])
        np.testing.assert_array_equal(found, expected[index])
    assert len(table) == 10
    table.variables[1].assign(np.full((5, 2), 7.0))
    np.testing.assert_array_equal(table[4:6], [[8, 9], [7, 7]])
    table.assign(expected)
    assert "rows [5:10], shape=(5, 2)" in repr(table.variables[1])
    with pytest.raises(AttributeError, match=r"has 2 shards.*variables\[i\].device"):
        _ = table.device


def test_variables_in_one_part(synchronous, table) -> None:
    with synchronous.scope():
        whole = keras.Variable(3.0)
    assert not isinstance(whole, ks.ShardedVariable)
    assert whole.device.startswith("/job:ps/replica:0/task:")
    with synchronous.extended.colocate_vars_with(table):
        near = [keras.Variable(np.zeros((4, 2))) for _ in range(3)]
    assert {v.device for v in near} == {table.variables[0].device}
    assert not any(isinstance(v, ks.ShardedVariable) for v in near)
    elsewhere = keras.Variable(1.0)
    with (
        pytest.raises(ks.errors.ContextError, match="was not created in the scope"),
        synchronous.extended.colocate_vars_with(elsewhere),
    ):
        pass


def test_run_is_a_step_of_a_worker(synchronous, table) -> None:
    with synchronous.scope():
        count = keras.Variable(0.0, trainable=False)

    def step(x, scale=1.0):
        count.assign_add(1.0)
        ids = np.array([1, 7])
        return {"rows": keras.ops.take(table, ids, axis=0) * x * scale, "name": "step"}

    for _ in range(2):
        found = synchronous.run(step, args=(2.0,), kwargs={"scale": 0.5})
    assert found["name"] == "step" and keras.ops.is_tensor(found["rows"])
    np.testing.assert_array_equal(found["rows"], [[2, 3], [14, 15]])
    assert float(synchronous.reduce("SUM", found["rows"], axis=None)[0][0]) == 2.0
    assert float(count.numpy()) == 2.0

    def fails():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        synchronous.run(fails)
    # The error has surfaced; the next function is not refused because of it.
    assert ks.ClusterCoordinator(synchronous).schedule(lambda: 5).fetch(60) == 5
    with pytest.raises(ks.errors.InvalidArgumentError, match="`args` of `run`"):
        synchronous.run(step, args=2.0)


@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.skipif(BACKEND == "torch", reason="ks.function traces nothing on Torch")
def test_run_in_a_program_of_the_coordinator_is_refused(synchronous) -> None:
    step = ks.function(lambda: synchronous.run(lambda: 1.0))
    with pytest.raises(ks.errors.ContextError, match="schedule"):
        step()


@pytest.mark.parametrize("where", ["coordinator", "worker"])
def test_gradients_by_a_partitioned_variable(synchronous, table, where) -> None:
    ids = np.array([1, 7, 7])
    # On TensorFlow, mirrored strategies install how variables are created.
    ks.MirroredStrategy(["cpu:0", "cpu:1"])

    def gradients():
        return ks.value_and_grad(squares(table, ids), [table])()

    if where == "coordinator":
        loss, (gradient,) = gradients()
    else:
        scheduled = ks.ClusterCoordinator(synchronous).schedule(gradients)
        loss, (gradient,) = scheduled.fetch(clusters.SECONDS)
    expected = np.zeros((10, 2))
    expected[1] = 2 * np.array([2, 3])
    expected[7] = 4 * np.array([14, 15])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(gradient), expected)
    assert float(loss) == 4 + 9 + 2 * (14**2 + 15**2)
    # It is a variable of the servers again.
    assert isinstance(table, ks.ShardedVariable)
    np.testing.assert_array_equal(table.numpy()[1], [2, 3])


def test_assignments_while_gradients_are_computed_are_kept(synchronous) -> None:
    with synchronous.scope():
        weight = keras.Variable(np.ones(4, "float32"))

    def loss():
        value = keras.ops.sum(weight * 2.0)
        weight.assign(weight * 3.0)
        return value

    ks.value_and_grad(loss, [weight])()
    np.testing.assert_array_equal(weight.numpy(), np.full(4, 3.0))


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.skipif(BACKEND == "jax", reason="JAX differentiates by arguments")
def test_other_ways_to_gradients_are_refused(table) -> None:
    with pytest.raises(ks.errors.BackendError, match=r"ks\.value_and_grad"):
        if BACKEND == "torch":
            squares(table, np.array([1]))().backward()
        else:
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = squares(table, np.array([1]))()
            tape.gradient(loss, [table])


@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="these are TensorFlow's own")
def test_checkpoints_lookups_and_saved_models_of_tensorflow(
    synchronous, model, table, tmp_path
) -> None:
    import tensorflow as tf

    (dense, codes), y = clusters.clicks(16)
    model.fit([dense, codes], y, batch_size=8, verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "checkpoint"))
    # TensorFlow does not track the states of Keras's seed generators.
    saved = [v for v in model.variables if v.name != "seed_generator_state"]
    saved += model.optimizer.variables
    before = clusters.values(saved)
    model.fit([dense, codes], y, batch_size=8, verbose=0)
    checkpoint.restore(path).assert_consumed()
    after = clusters.values(saved)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)

    with pytest.raises(ks.errors.BackendError, match=r"model\.export"):
        tf.saved_model.save(model, str(tmp_path / "saved"))

    found = synchronous.run(lambda: tf.nn.embedding_lookup(table, [1, 7]))
    np.testing.assert_array_equal(found, [[2, 3], [14, 15]])

    class Lookup(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(40, 4), name="table")

        def call(self, codes):
            return tf.nn.embedding_lookup(self.table, codes)

    with synchronous.scope():
        inputs = keras.Input((3,), dtype="int32")
        rows = keras.layers.Flatten()(Lookup()(inputs))
        other = keras.Model(inputs, keras.layers.Dense(1)(rows))
        other.compile("sgd", "mse")
    history = other.fit(codes, y, batch_size=8, epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.skipif(BACKEND == "jax", reason="its export takes half a minute")
def test_a_model_is_exported(model, tmp_path) -> None:
    (dense, codes), _ = clusters.clicks(8)
    path = str(tmp_path / "exported")
    expected = model.predict([dense, codes], verbose=0)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        model.export(path, verbose=False)
        loaded = tf.saved_model.load(path)
        found = loaded.serve([dense, codes])
    else:
        import torch

        path += ".pt2"
        model.export(path, format="torch", verbose=False)
        module = torch.export.load(path).module()
        # Keras exports for one row where no signature is given.
        found = module([torch.from_numpy(dense[:1]), torch.from_numpy(codes[:1])])
        expected, found = expected[:1], found.detach()
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    # It is a model on parameter servers again.
    assert isinstance(model.layers[-1].kernel, ks.ShardedVariable)
    again = model.predict([dense, codes], verbose=0)
    np.testing.assert_array_equal(again[: len(expected)], expected)
