"""Models, callbacks and files under a strategy."""

from __future__ import annotations

import contextlib
import functools
import re

import keras
import numpy as np
import pytest
from harness import strategies
from harness.forker import run_code
from keras import layers

pytestmark = pytest.mark.one_backend

RANDOM = np.random.default_rng(7)
X = RANDOM.normal(size=(16, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 16)


def build(compiled: bool = True) -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((6,))
    hidden = layers.Dense(8, activation="tanh", name="hidden")(inputs)
    hidden = layers.BatchNormalization(name="norm")(hidden)
    outputs = layers.Dense(3, activation="softmax", name="out")(hidden)
    model = keras.Model(inputs, outputs)
    if compiled:
        compile_model(model)
    return model


def compile_model(model: keras.Model, rate: float = 0.1) -> None:
    model.compile(
        keras.optimizers.SGD(rate, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )


def fit(model: keras.Model, **options) -> dict[str, list[float]]:
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, **options).history


def assert_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@functools.cache
def alone() -> list[tuple[float, list[np.ndarray]]]:
    """The loss and the weights of one device after each of four epochs."""
    model = build()
    return [(fit(model)["loss"][0], model.get_weights()) for _ in range(4)]


def assert_trained(model: keras.Model, history: dict[str, list[float]], n: int) -> None:
    """Fails unless the model ends `n` epochs as one device does."""
    loss, weights = alone()[n - 1]
    np.testing.assert_allclose(history["loss"][-1], loss, rtol=1e-5)
    assert_close(model.get_weights(), weights)


class Ready:
    """A model made in a strategy's scope and compiled outside of it.

    Calling it returns the model as it was before any training, so that tests that do
    not ask for more than a model share its programs.
    """

    def __init__(self, strategy=None) -> None:
        self.strategy = strategy
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            self._model = build(compiled=False)
        compile_model(self._model)
        self._start = self._model.get_weights()

    def __call__(self) -> keras.Model:
        self._model.set_weights(self._start)
        for variable in self._model.optimizer.variables:
            variable.assign(np.zeros(variable.shape, variable.dtype))
        self._model.optimizer.learning_rate = 0.1
        self._model._initial_epoch = None  # Where `BackupAndRestore` went on.
        return self._model


@functools.cache
def ready(name: str | None = "mirrored_2") -> Ready:
    """The model of a strategy; of none if the name is None."""
    return Ready(name and strategies.STRATEGIES[name].make())


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["one_device", "central"])
def test_compile_outside_of_the_scope_and_fit_again(strategy_case) -> None:
    model, strategy = ready(strategy_case.name)(), ready(strategy_case.name).strategy
    for epoch in (1, 2, 3):
        assert_trained(model, fit(model), epoch)
    homes = set(strategy.extended.parameter_devices)
    copies_of = strategy.drivers.fit.copies
    for variable in model.optimizer.variables:
        assert {copy.device for copy in copies_of(variable)} <= homes
    table = strategy.describe(model)
    assert "hidden/kernel" in str(table)
    assert "6x8" in str(table)
    assert "<table>" in table._repr_html_() and "hidden/kernel" in table._repr_html_()
    expected: dict[str, int] = {}
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    for variable in {id(v): v for v in variables}.values():
        for copy in copies_of(variable):
            expected[copy.device] = expected.get(copy.device, 0) + copy.nbytes
    assert table.totals == expected


@pytest.mark.one_backend("jax")
@strategies.TWO_REPLICAS_BY_DAY
def test_fit_may_stand_in_the_scope(strategy) -> None:
    with strategy.scope():
        model = build()
        history = fit(model)
        inside = model.evaluate(X, Y, verbose=0)
    assert_trained(model, history, 1)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), inside, rtol=1e-6)


def test_central_storage_keeps_one_copy_of_everything() -> None:
    model, strategy = ready("central")(), ready("central").strategy
    fit(model)
    assert len(model.optimizer.variables) > len(model.trainable_variables)
    for variable in (*model.variables, *model.optimizer.variables):
        (copy,) = strategy.drivers.fit.copies(variable)
        assert copy.device == "cpu:0", variable.path
        nbytes = int(np.prod(variable.shape)) * 4
        assert copy.nbytes == nbytes or "int" in variable.dtype


def test_describe_of_a_model_made_elsewhere(mirrored) -> None:
    with pytest.raises(RuntimeError, match="not created in the scope"):
        mirrored.describe(build())


def test_callbacks_do_what_they_do_on_one_device(tmp_path) -> None:
    def callbacks(folder):
        return [
            keras.callbacks.ModelCheckpoint(str(folder / "best.keras")),
            keras.callbacks.EarlyStopping(monitor="val_loss", patience=1),
            keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
            keras.callbacks.BackupAndRestore(str(folder / "backup")),
        ]

    histories = []
    options = {"epochs": 6, "validation_data": (X[:7], Y[:7])}
    for name in (None, "mirrored_2"):
        folder = tmp_path / str(name)
        folder.mkdir()
        histories.append(fit(ready(name)(), callbacks=callbacks(folder), **options))
        assert (folder / "best.keras").exists()
        lines = (folder / "log.csv").read_text().splitlines()
        assert len(lines) == len(histories[-1]["loss"]) + 1
    assert histories[0].keys() == histories[1].keys()
    for key, values in histories[0].items():
        np.testing.assert_allclose(histories[1][key], values, rtol=1e-5, err_msg=key)


def test_tensorboard_writes_its_events(tmp_path) -> None:
    fit(ready()(), callbacks=[keras.callbacks.TensorBoard(str(tmp_path))])
    assert list(tmp_path.rglob("events.*"))


def test_a_callback_evaluates_predicts_saves_and_changes_the_rate(tmp_path) -> None:
    def train(model):
        seen = []

        def after_epoch(epoch, logs):
            seen.append(model.evaluate(X, Y, verbose=0, return_dict=True)["loss"])
            seen.append(float(model.predict(X[:3], verbose=0).sum()))
            model.save(tmp_path / "during.keras")
            model.optimizer.learning_rate = 0.01

        callback = keras.callbacks.LambdaCallback(on_epoch_end=after_epoch)
        fit(model, epochs=2, callbacks=[callback])
        return seen

    model, plain = ready()(), ready(None)()
    np.testing.assert_allclose(train(model), train(plain), rtol=1e-5)
    assert_close(model.get_weights(), plain.get_weights())


def test_an_interrupted_run_resumes_from_its_backup(tmp_path) -> None:
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                raise RuntimeError("interrupted")

    def backup():
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))

    with pytest.raises(RuntimeError, match="interrupted"):
        fit(ready()(), epochs=4, callbacks=[backup(), Interrupt()])
    again = ready()()
    history = fit(again, epochs=4, callbacks=[backup()])
    assert len(history["loss"]) < 4
    assert_trained(again, history, 4)


@pytest.mark.one_backend("jax")
@strategies.TWO_REPLICAS_BY_DAY
def test_a_saved_model_opens_with_and_without_a_strategy(strategy_case, tmp_path):
    model, strategy = ready(strategy_case.name)(), ready(strategy_case.name).strategy
    fit(model)
    path = tmp_path / "model.keras"
    model.save(path)
    plain = keras.models.load_model(path)
    with strategy.scope():
        distributed = keras.models.load_model(path)
    assert strategy.owns(distributed)
    # The optimizer's momentum went on too.
    for opened in (plain, distributed):
        assert_trained(opened, fit(opened), 2)


@pytest.mark.slow(seconds=10)
def test_a_saved_model_opens_on_another_backend(mirrored, tmp_path, backend_name):
    other = "torch" if backend_name == "jax" else "jax"
    with mirrored.scope():
        model = build()
    model.save(tmp_path / "model.keras")
    np.save(tmp_path / "x.npy", X)
    # Keras looks for TensorFlow on every backend, which takes seconds. The library is
    # not needed.
    code = (
        "import sys; sys.modules['tensorflow'] = sys.modules['keras_strategies'] = None"
        "\nimport keras, numpy as np; folder = sys.argv[1]; "
        "model = keras.models.load_model(folder + '/model.keras'); "
        "np.save(folder + '/y.npy', model.predict(np.load(folder + '/x.npy')))"
    )
    run_code(tmp_path, code, str(tmp_path), backend=other)
    found = np.load(tmp_path / "y.npy")
    np.testing.assert_allclose(found, model.predict(X, verbose=0), rtol=1e-4, atol=1e-6)


def freeze_and_unfreeze(model: keras.Model) -> tuple[list[float], list[np.ndarray]]:
    fit(model)
    model.get_layer("hidden").trainable = False
    model.get_layer("norm").trainable = False
    compile_model(model)
    before = model.get_layer("hidden").get_weights()
    fit(model)
    for one, other in zip(model.get_layer("hidden").get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
    model.trainable = True
    compile_model(model, 0.05)
    return fit(model)["loss"], model.get_weights()


@functools.cache
def frozen_alone() -> tuple[list[float], list[np.ndarray]]:
    return freeze_and_unfreeze(build())


@strategies.TWO_REPLICAS_BY_DAY
def test_freezing_and_unfreezing_between_fits(strategy) -> None:
    with strategy.scope():
        model = build()
    loss, weights = freeze_and_unfreeze(model)
    expected_loss, expected = frozen_alone()
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    assert_close(weights, expected)


def test_a_clone_belongs_to_the_scope_that_it_is_made_in(mirrored) -> None:
    with mirrored.scope():
        model = build()
        clone = keras.models.clone_model(model)
    assert mirrored.owns(clone)
    clone.set_weights(model.get_weights())
    compile_model(clone)
    assert_trained(clone, fit(clone), 1)


def test_paths_of_the_optimizers_variables_are_those_of_keras(mirrored) -> None:
    def paths(scope) -> list[str]:
        with scope:
            model = keras.Sequential([keras.Input((6,)), layers.Dense(3, name="last")])
            inner = keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)
            model.compile(
                keras.optimizers.LossScaleOptimizer(inner, name="scaled"),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
        model.fit(X, Y, verbose=0)
        # Models and optimizers are numbered.
        return [re.sub(r"_\d+", "", each.path) for each in model.optimizer.variables]

    assert paths(mirrored.scope()) == paths(contextlib.nullcontext())


def test_variables_say_what_they_are_and_where(mirrored) -> None:
    options = {"synchronization": "on_read", "aggregation": "sum", "name": "counter"}
    with mirrored.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="d")])
        model.compile("sgd", "mse")
        counter = keras.Variable(0.0, **options)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    text = repr(model.weights[0])
    assert "d/kernel, shape=(2, 1), dtype=float32" in text
    assert re.search(r"(mirrored )?on cpu:0(, cpu:1)?>$", text), text
    assert "per-replica, aggregation='sum', on cpu:0" in repr(counter)
    assert "cpu:0" not in repr(keras.Variable(0.0))
