"""The TensorFlow backend: what holds there beyond the suites of all backends."""

from __future__ import annotations

import contextlib
import logging
import textwrap
import warnings

import keras
import numpy as np
import pytest
from harness.forker import run_code
from keras import layers, ops

import keras_strategies as ks
from keras_strategies import errors
from keras_strategies.keras_compat.models import building

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf

ks.set_virtual_cpu_devices(4)

STRATEGIES = {
    "one_device": lambda: ks.OneDeviceStrategy("cpu:1"),
    "mirrored_2": lambda: ks.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_4": lambda: ks.MirroredStrategy([f"cpu:{i}" for i in range(4)]),
    "central": lambda: ks.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:0"),
    "central_of_one": lambda: ks.CentralStorageStrategy(["cpu:1"], "cpu:0"),
}
# Four replicas run the code of two; what two find, four find in the nightly run.
on_two_and_four = pytest.mark.parametrize(
    "name", ["mirrored_2", pytest.param("mirrored_4", marks=pytest.mark.nightly)]
)


def two():
    return STRATEGIES["mirrored_2"]()


def four():
    return STRATEGIES["mirrored_4"]()


def rows(count: int, features: int = 6):
    random = np.random.default_rng(0)
    x = random.normal(size=(count, features)).astype("float32")
    y = (random.uniform(size=(count, 1)) < 0.5).astype("float32")
    weights = random.uniform(0.5, 2.0, size=count).astype("float32")
    return x, y, weights


def make_model(optimizer=None, **compile_arguments):
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dense(4, activation="tanh", activity_regularizer="l1"),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9),
        "binary_crossentropy",
        metrics=["accuracy"],
        weighted_metrics=[keras.metrics.AUC(num_thresholds=20, name="auc")],
        **compile_arguments,
    )
    return model


def small_model(optimizer="sgd", **compile_arguments):
    """A model of few operations, for what does not depend on its layers."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(3, use_bias=False),
            layers.BatchNormalization(),
        ]
    )
    model.add(layers.Dense(1))
    model.compile(optimizer, "mse", **compile_arguments)
    return model


def under(strategy, make, train):
    """What `train(model)` returns, and the weights after it, from pinned seeds.

    Without a strategy steps run eagerly: to trace a program takes longer than the few
    steps that a test compares.
    """
    keras.utils.set_random_seed(7)
    if strategy is None:
        model = make()
        model.run_eagerly = True
    else:
        with strategy.scope():
            model = make()
    return train(model), model.get_weights()


def assert_close(expected, found, tolerance=1e-5):
    expected, found = keras.tree.flatten(expected), keras.tree.flatten(found)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        a, b = np.asarray(a, "float64"), np.asarray(b, "float64")
        scale = max(np.abs(a).max(initial=0), 1e-2)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * scale)


def assert_same(strategy, make, train, tolerance=1e-5):
    assert_close(under(None, make, train), under(strategy, make, train), tolerance)


def fit_evaluate_predict(count, batch=8, epochs=3):
    def train(model):
        x, y, weights = rows(count)
        history = model.fit(
            x,
            y,
            sample_weight=weights,
            batch_size=batch,
            epochs=epochs,
            shuffle=False,
            verbose=0,
            validation_data=(x[:9], y[:9]),
        ).history
        scores = model.evaluate(x, y, batch_size=batch, verbose=0)
        return history, scores, model.predict(x, batch_size=batch, verbose=0)

    return train


def fit(count, batch=8, epochs=2):
    """Trains on `count` rows; a last batch of another size needs another program."""

    def train(model):
        x, y, _ = rows(count)
        options = {"batch_size": batch, "epochs": epochs, "shuffle": False}
        return model.fit(x, y, verbose=0, **options).history

    return train


class Rows(layers.Layer):
    """Notes the static rows of each traced call, one for each program and replica."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = []

    def call(self, x):
        if tf.executing_eagerly():  # A check whether rows depend on each other.
            return x
        replica = ks.get_replica_context()
        on = None if replica is None or not ks.has_strategy() else replica
        self.seen.append((x.shape[0], on and on.replica_id_in_sync_group))
        return x


# --- Exactness ----------------------------------------------------------------
#
# `tests/test_exactness.py` trains under one device, two and four mirrored replicas and
# central storage, with any number of rows, each optimizer and each way to run a step.
# Here is what its strategies do not reach, and a model that has in one training what
# its cases have one by one.


def test_fit_is_exact_with_variables_apart_from_the_only_replica():
    assert_same(STRATEGIES["central_of_one"](), small_model, fit(16))


ADAM = {"optimizer": lambda: keras.optimizers.Adam(0.01, weight_decay=0.01)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "count", "arguments"),
    [
        *[("mirrored_4", count, {}) for count in (22, 23, 25, 3, 1)],
        *[(name, 23, {}) for name in sorted(set(STRATEGIES) - {"mirrored_4"})],
        *[(name, 23, ADAM) for name in ("mirrored_2", "mirrored_4")],
        ("mirrored_4", 25, {"run_eagerly": True}),
        ("mirrored_4", 25, {"steps_per_execution": 3}),
    ],
    ids=str,
)
def test_fit_is_exact(name, count, arguments):
    def make():
        optimizer = arguments.get("optimizer", lambda: None)()
        others = {k: v for k, v in arguments.items() if k != "optimizer"}
        return make_model(optimizer, **others)

    tolerance = 1e-4 if "optimizer" in arguments else 1e-5
    assert_same(STRATEGIES[name](), make, fit_evaluate_predict(count), tolerance)


@pytest.mark.nightly
def test_methods_on_batches_are_exact():
    def train(model):
        x, y, weights = rows(11)
        logs = [
            model.train_on_batch(x[:n], y[:n], weights[:n]) for n in (11, 8, 7, 3, 1)
        ]
        scores = [model.test_on_batch(x[:n], y[:n]) for n in (11, 5, 1)]
        return logs, scores, [model.predict_on_batch(x[:n]) for n in (11, 5, 1)]

    assert_same(four(), make_model, train)


@pytest.mark.nightly
def test_a_transformer_is_exact_over_many_steps():
    def make():
        tokens = keras.Input((12,), dtype="int32")
        x = layers.Embedding(50, 16)(tokens)
        attended = layers.MultiHeadAttention(2, 8)(x, x)
        x = layers.LayerNormalization()(x + attended)
        hidden = layers.Dense(16)(layers.Dense(32, activation="relu")(x))
        x = layers.LayerNormalization()(x + hidden)
        x = layers.GlobalAveragePooling1D()(x)
        model = keras.Model(tokens, layers.Dense(10)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss)
        return model

    def train(model):
        random = np.random.default_rng(0)
        x, y = random.integers(0, 50, (64, 12)), random.integers(0, 10, 64)
        return model.fit(
            x, y, batch_size=16, epochs=15, shuffle=False, verbose=0
        ).history["loss"]

    assert_same(two(), make, train)


# --- Programs -----------------------------------------------------------------


# 25: the last batch has fewer rows than there are replicas, which is a program of its
# own kind; 22 and 23: it has more, and is split unevenly.
@pytest.mark.parametrize(
    "count",
    [22, 25, pytest.param(23, marks=pytest.mark.nightly)],
)
def test_at_most_two_programs_for_batches_of_any_size(count):
    keras.utils.set_random_seed(7)
    with four().scope():
        counting = Rows()
        model = keras.Sequential([keras.Input((6,)), counting, layers.Dense(1)])
        model.compile("sgd", "mse")
    counting.seen.clear()
    x, y, _ = rows(count)
    model.fit(x, y, batch_size=8, epochs=3, verbose=0)
    # A program has one call per replica, or one for all.
    programs = sum(replica in (0, None) for _, replica in counting.seen)
    assert 1 <= programs <= 2
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert sum(replica in (0, None) for _, replica in counting.seen) == programs


def test_the_first_step_is_traced_once():
    """Slots and metrics that a trace creates would make TensorFlow trace it twice."""
    traces = []

    class Counts(keras.optimizers.SGD):
        def apply(self, *args, **kwargs):
            traces.append(self.built)
            return super().apply(*args, **kwargs)

    with two().scope():
        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile(Counts(0.1, momentum=0.9), "mse", metrics=["mae"])
    x, y, _ = rows(8)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert traces == [True]


@pytest.fixture
def retracing():
    """What TensorFlow says of functions that are traced again and again."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = tf.get_logger()
    logger.addHandler(handler)
    yield lambda: [line for line in said if "retracing" in line]
    logger.removeHandler(handler)


@pytest.mark.parametrize("length", [4, None], ids=["known", "unknown-length"])
def test_metrics_are_built_from_the_known_outputs_of_a_functional_model(length):
    class Counted(layers.Layer):
        calls = 0

        def call(self, x):
            Counted.calls += 1
            return ops.sum(x, axis=1)

    with two().scope():
        tokens = keras.Input((length,), dtype="int32")
        hidden = Counted()(layers.Embedding(7, 5)(tokens))
        outputs = {"a": layers.Dense(3)(hidden), "b": layers.Dense(1)(hidden)}
        model = keras.Model(tokens, outputs)
        metrics = {"a": [keras.metrics.F1Score()], "b": ["mae"]}
        model.compile("sgd", {"a": "mse", "b": "mse"}, metrics=metrics)
    x = np.zeros((4, 4), "int32")
    Counted.calls = 0
    building.symbolic_build(model, (x, {"a": np.ones((4, 3)), "b": np.ones((4, 1))}))
    assert Counted.calls == 0
    found = {variable.path for variable in model.metrics_variables}
    assert any("f1_score" in path for path in found), found
    assert model.optimizer.built


def test_models_one_after_the_other_are_not_taken_for_retracing(mirrored, retracing):
    for _ in range(6):
        with mirrored.scope():
            model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        model.predict(np.zeros((4, 2), "float32"), verbose=0)
    assert not retracing()


def test_functions_that_replicas_run_are_not_taken_for_retracing(mirrored, retracing):
    traces = []

    def function(number):  # Of a code object of its own.
        source = f"def replica_step(x):\n    traces.append({number})\n    return x"
        namespace = {"traces": traces}
        exec(source, namespace)
        return tf.function(namespace["replica_step"], autograph=False)

    functions = [function(number) for number in range(6)]
    for _ in range(2):
        for each in functions:
            mirrored.run(each, args=(tf.zeros(()),))
    assert not retracing()
    assert sorted(traces) == [number for number in range(6) for _ in "ab"]


def test_every_replica_takes_part():
    with four().scope():
        counting = Rows()
        model = keras.Sequential([keras.Input((6,)), counting, layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y, _ = rows(16)
    counting.seen.clear()
    model.train_on_batch(x, y)
    assert counting.seen == [(4, i) for i in range(4)]


def test_jit_compile_is_said_not_to_apply_and_changes_nothing():
    expected = under(None, small_model, fit(16))
    with pytest.warns(UserWarning, match="runs without XLA") as warned:
        found = under(two(), lambda: small_model(jit_compile=True), fit(16))
    (said,) = [w for w in warned if "runs without XLA" in str(w.message)]
    assert said.filename == __file__
    assert_close(expected, found)


def test_automatic_jit_compile_is_off_with_several_devices(monkeypatch):
    strategy = two()
    with strategy.scope():
        model = small_model()
        # As it is on a machine with a GPU, where Keras would choose XLA.
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind=None: [Accelerator()]
        )
        model.compile("sgd", "mse")
    assert model.jit_compile is False


class Accelerator:
    device_type = "GPU"


# --- Building -----------------------------------------------------------------


class Subclassed(keras.Model):
    def __init__(self, norm=True):
        super().__init__()
        self.hidden = layers.Dense(8, activation="relu")
        self.norm = layers.BatchNormalization()
        self.rows_seen = Rows()
        self.out = layers.Dense(1)

    def call(self, x, training=False):
        return self.out(self.rows_seen(self.norm(self.hidden(x), training=training)))


def test_an_unbuilt_model_loses_no_batch_of_a_generator():
    def make():
        model = Subclassed()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def train(model):
        x, y, _ = rows(22)
        batches = ((x[i : i + 8], y[i : i + 8]) for i in range(0, 22, 8))
        return model.fit(batches, verbose=0).history

    assert_same(two(), make, train)


def test_an_unbuilt_model_is_parallel_from_the_first_step():
    with two().scope():
        model = Subclassed()
        model.compile("sgd", "mse")
    x, y, _ = rows(8)
    model.fit(x, y, batch_size=8, verbose=0)
    assert model.rows_seen.seen[-1][1] == 1


def test_a_model_that_only_predicts_is_parallel_from_the_second_batch():
    with two().scope():
        model = Subclassed()
    x, _, _ = rows(24)
    outputs = model.predict(x, batch_size=8, verbose=0)
    assert model.rows_seen.seen[-1][1] == 1
    assert_close(ops.convert_to_numpy(model(x)), outputs)


class Adversaries(keras.Model):
    """Two models trained in turn; it cannot be called itself."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([layers.Dense(8), layers.Dense(6)])
        self.discriminator = keras.Sequential([layers.Dense(8), layers.Dense(1)])

    def compile(self):
        super().compile()
        self.optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.05)]
        self.criterion = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data):
        real, noise = data
        count = tf.shape(real)[0]
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], 0)
        with tf.GradientTape() as tape:
            fake = self.generator(noise)
            both = self.discriminator(tf.concat([real, fake], 0), training=True)
            loss = self.criterion(labels, both)
        self._update(0, self.discriminator, tape, loss)
        with tf.GradientTape() as tape:
            judged = self.discriminator(self.generator(noise, training=True))
            wanted = self.criterion(tf.ones((count, 1)), judged)
        self._update(1, self.generator, tape, wanted)
        return {"d": loss, "g": wanted}

    def _update(self, i, model, tape, loss):
        variables = model.trainable_variables
        self.optimizers[i].apply(tape.gradient(loss, variables), variables)


@on_two_and_four
def test_adversaries_are_exact(name):
    def train(model):
        x, _, _ = rows(18)
        data = tf.data.Dataset.from_tensor_slices((x, x[::-1])).batch(9)
        return [model.fit(data, verbose=0).history for _ in range(2)]

    def make():
        model = Adversaries()
        model.compile()
        return model

    assert_same(STRATEGIES[name](), make, train)


# --- Replicas without rows ----------------------------------------------------


class FirstRows(keras.Model):
    """Trains on the first rows of a batch, as many as the batch says.

    The number is not known when the step is traced: one program is for all.
    """

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x, training=False):
        return self.inner(x, training=training)

    def train_step(self, data):
        x, y, count = data
        some = tf.range(count[0])
        return super().train_step((tf.gather(x, some), tf.gather(y, some)))


class MeanPenalty(layers.Layer):
    """Adds a loss that is no number where there are no rows."""

    def call(self, x):
        self.add_loss(ops.mean(ops.square(x)))
        return x


def image_layers():
    return [
        keras.Input((6, 6, 2)),
        layers.Dense(4, activation="relu"),
        layers.BatchNormalization(),
        layers.AveragePooling2D(2),
        layers.Flatten(),
        MeanPenalty(),
        layers.Dense(3, activity_regularizer="l2"),
    ]


def sentence_layers():
    return [
        keras.Input((5,), dtype="int32"),
        layers.Embedding(10, 4, mask_zero=True),
        layers.BatchNormalization(),
        layers.LSTM(4),
        layers.Dense(3),
    ]


def attention_layers():
    x = keras.Input((5, 4))
    y = layers.MultiHeadAttention(2, 2)(x, x)
    y = layers.LayerNormalization()(y + x)
    y = layers.GroupNormalization(2)(y)
    y = layers.Dense(4, activation="relu")(y)
    return keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(y)))


def _random(shape, kind):
    random = np.random.default_rng(1)
    return (
        random.integers(0, 10, shape)
        if kind == "int"
        else random.normal(size=shape).astype("float32")
    )


def batches_of_some(x, y, counts):
    """A batch of all rows for each count, with the count beside each row."""
    data = tf.data.Dataset.from_tensor_slices(counts)
    return data.map(lambda count: (x, y, tf.repeat(count, len(x))))


# Two replicas run what four run, and take half as long to trace; with four, several
# have no rows.
ODD_LAYERS = {
    "images": (lambda: keras.Sequential(image_layers()), ((9, 6, 6, 2), "float"), 4),
    "sentences": (lambda: keras.Sequential(sentence_layers()), ((9, 5), "int"), 2),
    "attention": (attention_layers, ((9, 5, 4), "float"), 2),
}


@pytest.mark.parametrize("kind", ODD_LAYERS)
def test_replicas_without_rows_add_nothing(kind):
    make_inner, shape, replicas = ODD_LAYERS[kind]
    x, y = _random(*shape), _random((9, 3), "float")

    def make():
        model = FirstRows(make_inner())
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    def train(model):
        losses = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: losses.append(logs["loss"])
        )
        model.fit(batches_of_some(x, y, [1, 3, 6]), callbacks=[note], verbose=0)
        return losses

    assert_same(STRATEGIES[f"mirrored_{replicas}"](), make, train, 2e-5)


@pytest.mark.parametrize(
    "layer", [layers.Conv2D(3, 3, padding="same"), layers.MaxPooling2D()]
)
def test_kernels_that_fail_on_no_rows_are_not_given_any(layer):
    x, y = _random((9, 6, 6, 2), "float"), _random((9, 3), "float")
    inner = [keras.Input((6, 6, 2)), layer, layers.Flatten(), layers.Dense(3)]
    with two().scope():
        model = FirstRows(keras.Sequential(inner))
        model.compile("sgd", "mse")
    model.fit(batches_of_some(x, y, [2]), verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="fewer rows than the 2"):
        model.fit(batches_of_some(x, y, [1]), verbose=0)


# --- Gradients ----------------------------------------------------------------


class Gradients(keras.Model):
    """A step that returns its gradients instead of using them."""

    def train_step(self, data):
        x, y, *_ = data
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = ops.mean(ops.square(self(x, training=True) - y))
        self.found = tape.gradient(loss, [*self.trainable_variables, x])
        return {"loss": loss}


def test_gradients_of_rows_of_a_table_stay_sparse():
    tokens = keras.Input((4,), dtype="int32")
    outputs = layers.Dense(1)(layers.Flatten()(layers.Embedding(100, 3)(tokens)))

    class Sparse(keras.Model):
        def train_step(self, data):
            x, y, *_ = data
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self(x) - y))
            table, *_ = tape.gradient(loss, self.trainable_variables)
            assert isinstance(table, tf.IndexedSlices)
            return {"rows": tf.size(table.indices)}

    with two().scope():
        model = Sparse(tokens, outputs)
        model.compile()
    x = np.arange(32).reshape(8, 4)
    logs = model.train_on_batch(x, np.zeros((8, 1), "float32"), return_dict=True)
    assert logs["rows"] == 32


def test_gradients_of_the_input_cross_the_replicas():
    x, y, _ = rows(11)

    def make():
        inputs = keras.Input((6,))
        hidden = layers.Dense(8, activation="tanh")(inputs)
        model = Gradients(inputs, layers.Dense(1)(layers.BatchNormalization()(hidden)))
        model.compile(run_eagerly=True)
        return model

    def train(model):
        model.train_on_batch(tf.constant(x), tf.constant(y))
        return [np.asarray(gradient) for gradient in model.found]

    assert_same(four(), make, train)


# Gradients through functions of users are tested below, in every run.
@pytest.mark.parametrize(
    "is_function", [False, pytest.param(True, marks=pytest.mark.nightly)]
)
def test_a_loop_has_more_than_one_gradient(is_function):
    """A persistent tape asks the replicas as often as its user asks it."""
    x, y = _random((7, 3, 2), "float"), _random((7, 3), "float")
    replicas = []

    class Noting(layers.Layer):
        def call(self, x):
            replicas.append(ks.has_strategy() and ks.get_replica_context())
            return x

    class Repeated(keras.Model):
        def train_step(self, data):
            x, y, *_ = data
            forward = lambda: self(x, training=True)  # noqa: E731
            forward = tf.function(forward) if is_function else forward
            with tf.GradientTape(persistent=True) as tape:
                outputs = forward()
                losses = [ops.mean(ops.square(outputs - y)), ops.mean(outputs)]
            values = [variable.value for variable in self.trainable_variables]
            names = ("first", "second", "again")
            return {
                name: keras.tree.map_structure(
                    tf.convert_to_tensor, tape.gradient(loss, values)
                )
                for name, loss in zip(names, (*losses, losses[0]), strict=True)
            }

    def make():
        # The layer with the fewest operations in its loop.
        inputs = keras.Input((3, 2))
        model = Repeated(inputs, layers.SimpleRNN(3)(Noting()(inputs)))
        model.compile()
        return model

    def train(model):
        replicas.clear()
        logs = model.train_on_batch(x, y, return_dict=True)
        assert_close(logs["first"], logs["again"])
        return logs["first"], logs["second"]

    # For a function under a persistent tape, TensorFlow makes the gradients of its
    # gradients too, asked for or not: they are made on one device.
    warned = pytest.warns(UserWarning, match="is differentiated itself")
    with warned if is_function else contextlib.nullcontext():
        assert_same(two(), make, train)
    assert any(replicas)


def test_a_layer_that_is_called_in_a_function_of_its_user_is_exact():
    class Wrapped(keras.Model):
        @tf.function
        def forward(self, x):
            return self(x, training=True)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self.forward(x) - y))
            variables = self.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            return {"loss": loss}

    def make():
        inputs = keras.Input((6,))
        hidden = layers.BatchNormalization()(layers.Dense(8)(inputs))
        model = Wrapped(inputs, layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.1))
        return model

    assert_same(two(), make, fit(18, batch=9))


# --- Collectives in layers ----------------------------------------------------


class Center(layers.Layer):
    """Subtracts the mean of the global batch, found in one way or another."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def call(self, x):
        replica = ks.get_replica_context() if ks.has_strategy() else None
        if replica is None:
            return x - ops.mean(x, 0)
        if self.way == "gather":
            return x - ops.mean(replica.all_gather(x, axis=0), 0)
        count = ops.cast(ops.shape(x)[0], x.dtype)
        total, rows = replica.all_reduce("sum", (ops.sum(x, 0), count))
        return x - total / rows


@pytest.mark.parametrize("eager", [False, True])
def test_collectives_in_layers_have_gradients(eager):
    def make():
        inputs = keras.Input((6,))
        first = Center("gather")(layers.Dense(5, activation="tanh")(inputs))
        second = Center("reduce")(layers.Dense(5, activation="tanh")(inputs))
        outputs = [layers.Dense(1)(first), layers.Dense(1)(second)]
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mse"], run_eagerly=eager)
        return model

    def train(model):
        x, y, _ = rows(11)
        given = {"batch_size": 11, "epochs": 2, "shuffle": False, "verbose": 0}
        return model.fit(x, [y, y], **given).history

    assert_same(two(), make, train)


def test_replicas_that_disagree_on_collectives_are_told():
    class Disagreeing(layers.Layer):
        def call(self, x):
            replica = ks.get_replica_context() if ks.has_strategy() else None
            if replica is not None and replica.replica_id_in_sync_group == 1:
                return replica.all_reduce("sum", x)
            return x

    with two().scope():
        model = keras.Sequential([keras.Input((6,)), Disagreeing(), layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y, _ = rows(8)
    with pytest.raises(errors.ReplicaMismatchError, match="same collective calls"):
        model.train_on_batch(x, y)


# --- What cannot be split is called whole -------------------------------------


def test_a_layer_with_variables_of_tensorflow_is_exact():
    class Foreign(layers.Layer):
        def __init__(self):
            super().__init__()
            self.scale = tf.Variable(2.0)
            self.calls = tf.Variable(0, trainable=False)

        def call(self, x):
            self.calls.assign_add(1)
            return x * self.scale

    with two().scope():
        foreign = Foreign()
        model = keras.Sequential([keras.Input((6,)), foreign, layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y, _ = rows(16)
    with pytest.warns(UserWarning, match="variables or modules of TensorFlow"):
        model.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert foreign.calls.numpy() == 4


def test_batch_normalization_is_split_over_replicas():
    """With the statistics of one replica it would be exact, too, but unsplit."""
    with two().scope():
        model = keras.Sequential(
            [keras.Input((6,)), layers.BatchNormalization(), layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    x, y, _ = rows(8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be split by rows")
        model.fit(x, y, batch_size=8, verbose=0)


def test_batch_normalization_in_a_loop_is_exact():
    class Looped(layers.Layer):
        def __init__(self):
            super().__init__()
            self.norm = layers.BatchNormalization(name="looped_norm")

        def build(self, shape):
            self.norm.build(shape)

        def call(self, x, training=False):
            def body(i, x):
                mean, variance = self.norm._moments(x, None)
                return i + 1, (x - mean) / ops.sqrt(variance + 1e-3)

            return ops.while_loop(lambda i, x: i < 2, body, (0, x))[1]

    def make():
        model = keras.Sequential([keras.Input((6,)), Looped(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    expected = under(None, make, fit(18, batch=9))
    with pytest.warns(UserWarning, match="in a loop or a branch"):
        found = under(two(), make, fit(18, batch=9))
    assert_close(expected, found)


def test_ragged_input_is_exact():
    class Bag(layers.Layer):
        def call(self, x):
            return tf.reduce_mean(tf.cast(x, "float32"), axis=1, keepdims=True)

    def make():
        inputs = keras.Input((None,), dtype="int64", ragged=True)
        model = keras.Model(inputs, layers.Dense(1)(Bag()(inputs)))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    def train(model):
        x = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7], [1, 1], [2]], "int64")
        data = tf.data.Dataset.from_tensor_slices((x, tf.ones((6, 1))))
        data = data.ragged_batch(4)
        return [model.fit(data, verbose=0).history for _ in range(2)]

    assert_same(two(), make, train)


# --- Keras inside replicas ----------------------------------------------------


def test_losses_of_keras_inside_a_layer_are_not_divided_by_replicas():
    class Reconstructing(layers.Layer):
        def __init__(self):
            super().__init__()
            self.code = layers.Dense(3)
            self.decode = layers.Dense(6)
            self.criterion = keras.losses.MeanSquaredError()

        def build(self, shape):
            self.code.build(shape)
            self.decode.build((None, 3))

        def call(self, x):
            code = self.code(x)
            self.add_loss(self.criterion(x, self.decode(code)))
            return code

    def make():
        model = keras.Sequential([keras.Input((6,)), Reconstructing(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    assert_same(two(), make, fit(11, batch=11))


@pytest.mark.parametrize("eager", [False, True])
def test_dropout_differs_between_replicas_and_repeats_with_the_seed(eager):
    def draw():
        keras.utils.set_random_seed(3)
        with two().scope():
            model = keras.Sequential([keras.Input((50,)), layers.Dropout(0.5)])
            model.compile("sgd", "mse", run_eagerly=eager)

        class Step(keras.callbacks.Callback):
            pass

        found = []
        model.train_step = lambda data: (
            found.append(model(data[0], training=True)) or {"n": found[-1]}
        )
        model.compute_metrics = None
        x = np.ones((4, 50), "float32")
        model.train_function = None
        logs = model.train_on_batch(x, x, return_dict=True)
        return np.asarray(logs["n"])

    first, again = draw(), draw()
    np.testing.assert_array_equal(first, again)
    assert len({row.tobytes() for row in first}) == 4


class Failing(layers.Layer):
    error: BaseException | None = None

    def call(self, x):
        replica = ks.get_replica_context() if ks.has_strategy() else None
        if self.error is not None and replica.replica_id_in_sync_group == 1:
            raise self.error
        return x


def test_an_error_in_a_replica_arrives_and_the_next_fit_works():
    x, y, _ = rows(16)
    with two().scope():
        failing = Failing()
        model = keras.Sequential(
            [keras.Input((6,)), failing, layers.BatchNormalization(), layers.Dense(1)]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    for error in (ZeroDivisionError("mine"), KeyboardInterrupt()):
        failing.error = error
        with pytest.raises(type(error)):
            model.fit(x, y, batch_size=8, verbose=0)
        assert not ks.has_strategy()
    failing.error = None
    history = model.fit(x, y, batch_size=8, epochs=3, verbose=0).history["loss"]
    assert np.isfinite(history).all()


def test_an_error_while_the_program_runs_arrives_and_the_next_fit_works():
    class Checking(layers.Layer):
        def call(self, x):
            tf.debugging.assert_less(x, 1e6, "too large")
            return x

    with two().scope():
        model = keras.Sequential([keras.Input((6,)), Checking(), layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y, _ = rows(16)
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        model.fit(x * 1e7, y, batch_size=8, verbose=0)
    assert np.isfinite(model.fit(x, y, batch_size=8, verbose=0).history["loss"]).all()


# --- Placement ----------------------------------------------------------------


def test_central_storage_keeps_every_variable_on_the_parameter_device():
    strategy = STRATEGIES["central"]()
    with strategy.scope():
        model = small_model("adam")
    model.train_on_batch(*rows(8)[:2])
    variables = [*model.variables, *model.optimizer.variables]
    devices = {c.device for v in variables for c in strategy.drivers.fit.copies(v)}
    assert devices == {"cpu:0"}
    assert "cpu:1, cpu:2" in str(strategy.describe(model))


def test_one_device_places_variables_and_output_there():
    with ks.OneDeviceStrategy("cpu:2").scope():
        model = small_model("adam")
    model.train_on_batch(*rows(8)[:2])
    for variable in [*model.variables, *model.optimizer.variables]:
        assert "CPU:2" in variable.value.device


def test_virtual_cpus_in_a_new_process(tmp_path):
    code = """
        import keras, keras_strategies as ks
        from keras_strategies.engines import get_engine
        # To list devices does not fix them.
        print(get_engine().local_devices())
        ks.set_virtual_cpu_devices(2)
        ks.set_virtual_cpu_devices(3)
        print(ks.MirroredStrategy())
        # To use one does.
        keras.ops.ones(3) + 1
        try:
            ks.MirroredStrategy(["cpu:0", "cpu:3"])
        except RuntimeError as error:
            print(error)
    """
    printed = run_code(tmp_path, textwrap.dedent(code))
    assert "cpu:0, cpu:1, cpu:2" in printed
    assert "Call `ks.set_virtual_cpu_devices(4)` first" in printed
