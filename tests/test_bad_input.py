"""Bad input: what the error says, and that everything works afterwards."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from harness.strategies import STRATEGIES

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

X = np.random.default_rng(0).normal(size=(22, 6)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, 22)


def build(optimizer: str = "sgd") -> keras.Model:
    keras.utils.set_random_seed(3)
    hidden = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization()]
    last = keras.layers.Dense(3, "softmax")
    model = keras.Sequential([keras.Input((6,)), *hidden, last])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return model


def fit(model: keras.Model, **options) -> dict:
    options = {"batch_size": 11, "shuffle": False, "verbose": 0, **options}
    return model.fit(X, Y, **options).history


@pytest.fixture(scope="module")
def model():
    """One model for all that goes wrong, the first time before it has been trained."""
    with STRATEGIES["mirrored_2"].make().scope():
        return build()


@pytest.fixture(scope="module")
def alone():
    """The same model on one device."""
    return build()


@pytest.fixture
def assert_still_exact(model, alone):
    """Fails if the model does not train from here on as one device does."""
    return lambda: _assert_same_fit(model, alone)


def _assert_same_fit(model: keras.Model, alone: keras.Model) -> None:
    alone.set_weights(model.get_weights())
    expected, found = fit(alone), fit(model)
    for key, values in expected.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-5)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_model_from_outside_the_scope_is_told_to_move(mirrored, alone) -> None:
    text = r"created outside of it.*with strategy.scope\(\)"
    with mirrored.scope(), pytest.raises(ks.errors.ModelScopeError, match=text):
        fit(alone)
    fit(alone)


def test_two_strategies_nested(model, assert_still_exact) -> None:
    other = ks.OneDeviceStrategy("cpu:0")
    with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        fit(model)
    assert_still_exact()


class NoBatch(keras.utils.PyDataset):
    def __len__(self):
        return 0


def loader_without_batches(rows: int):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(*map(torch.tensor, (X[:rows], Y[:rows])))
    return torch.utils.data.DataLoader(data, batch_size=4, drop_last=True)


def filtered():
    """A dataset without batches, which only a pass over it can know."""
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    return dataset.filter(lambda x, y: tf.reduce_max(x) > 1e9)


EMPTY = {
    "arrays": lambda: (X[:0], Y[:0]),
    "index": lambda: (NoBatch(),),
    "loader": lambda: (loader_without_batches(0),),
    "few_rows": lambda: (loader_without_batches(3),),
    "unknown": lambda: (filtered(),),
}
METHODS = ("fit", "evaluate", "predict")
CALLS = [(name, method) for name in EMPTY for method in METHODS if name != "unknown"]


# Keras warns in `fit` and `evaluate` of a dataset that turns out to be empty.
@pytest.mark.parametrize(("name", "method"), [*CALLS, ("unknown", "predict")])
def test_input_without_a_batch(model, name, method) -> None:
    given = EMPTY[name]()
    with pytest.raises(ks.errors.InputError, match=r"input is empty.*at least one b"):
        getattr(model, method)(*given[: 1 if method == "predict" else 2], verbose=0)


def test_a_dataset_that_is_not_batched(model, assert_still_exact) -> None:
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(ValueError, match=r"y of shape \(\).*\.batch\(batch_size\)"):
        model.fit(dataset, verbose=0)
    assert_still_exact()


def test_a_batch_whose_parts_have_different_lengths(model, assert_still_exact) -> None:
    with pytest.raises(ValueError, match=r"(?s)x of shape \(4, 6\), y of shape \(3,\)"):
        model.train_on_batch(X[:4], Y[:3])
    assert_still_exact()


class Break(keras.callbacks.Callback):
    """Raises an error at the second batch."""

    def __init__(self, error: BaseException):
        super().__init__()
        self.error = error

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise self.error


@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), KeyboardInterrupt()])
def test_a_callback_that_raises_and_ctrl_c(model, assert_still_exact, error) -> None:
    with pytest.raises(type(error)):
        fit(model, callbacks=[Break(error)])
    assert not ks.has_strategy()
    assert all(np.isfinite(weight).all() for weight in model.get_weights())
    assert_still_exact()


class Fails(keras.layers.Layer):
    """Raises an error when it is told to, in the call that replicas make."""

    broken = False

    def call(self, x):
        if Fails.broken:
            raise LookupError("a layer failed")
        return x


def test_a_layer_that_raises_on_the_replicas(mirrored, monkeypatch) -> None:
    with mirrored.scope():
        model = keras.Sequential([keras.Input((6,)), Fails(), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    fit(model)
    monkeypatch.setattr(Fails, "broken", True)
    with pytest.raises(LookupError, match="a layer failed"):
        fit(model)
    monkeypatch.setattr(Fails, "broken", False)
    assert np.isfinite(fit(model)["loss"]).all()


def compiled(function):
    """A function of one tensor as a program of the backend."""
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    import tensorflow as tf

    return tf.function(function)


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["predict"])
@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="Torch has no programs around `fit`."
)
@pytest.mark.parametrize("name", ["fit", "predict", "train_on_batch"])
def test_a_method_in_a_program(mirrored, name) -> None:
    """It must not leave a half-built optimizer or traced state."""
    with mirrored.scope():
        model = build("adam")  # Its slots would be created in the program.

    def program(x):
        getattr(model, name)(X, *(() if name == "predict" else (Y,)))
        return x

    with pytest.raises(ks.errors.ContextError, match=rf"`{name}` of model 'seq.* Call"):
        compiled(program)(np.float32(1))
    _assert_same_fit(model, build("adam"))


def test_options_that_cannot_be() -> None:
    make = ks.MultiWorkerMirroredStrategy
    options = ks.CommunicationOptions(implementation="NCCL")
    for devices in (None, ["cpu:0"]):
        with pytest.raises(ValueError, match=r"NCCL connects GPUs.*cpu:0"):
            make(communication_options=options, devices=devices)
    with pytest.raises(ValueError, match=r"`communication_options` must be a ks\.Comm"):
        make(communication_options="NCCL")
    text = "`sync_batch_norm` must be True or False.*'yes'"
    with pytest.raises(TypeError, match=text):
        ks.MirroredStrategy(["cpu:0"], sync_batch_norm="yes")


@pytest.mark.one_backend("jax")
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="refused on JAX")
def test_batch_norm_of_each_replica_is_refused_on_jax() -> None:
    with pytest.raises(RuntimeError, match="separate computations"):
        ks.MirroredStrategy(["cpu:0", "cpu:1"], sync_batch_norm=False)
