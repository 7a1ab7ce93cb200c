"""Layer calls by recorded operations: equal to direct calls, bit by bit, or direct."""

from __future__ import annotations

import copy
import functools
import gc
import weakref

import keras
import numpy as np
import pytest

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("of Torch", allow_module_level=True)

import torch

from keras_strategies.engines.torch.recorded_calls.recorded_calls import RecordedCalls

layers = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 5)).astype("float32")
Y = RNG.integers(0, 3, 6)
IMAGES = RNG.normal(size=(2, 8, 8, 3)).astype("float32")
SEQUENCES = RNG.normal(size=(2, 7, 6)).astype("float32")
IDS = RNG.integers(1, 9, (3, 7))


def recordings(layer, calls):
    """The number of recordings of a layer."""
    known = vars(layer)["_keras_strategies_recordings"].by_owner[calls]
    return sum(kind.recording is not None for kind in known.kinds.values())


def called(calls, layer, *args, times=1, **kwargs):
    """The last of several calls, as the strategies make them."""
    for _ in range(times):
        found = calls(layer, layer.__call__, args, kwargs)
    return found


def tensor(array):
    return torch.as_tensor(array)


def with_gradients(function, layer, x):
    """Outputs, and gradients of the input and of all weights, as arrays."""
    x = x.detach()
    if x.is_floating_point():
        x.requires_grad_()
    outputs = function(x)
    outputs = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    weights = [x, *(v.value for v in layer.trainable_variables)]
    wanted = [value for value in weights if value.requires_grad]
    loss = sum(
        (o * torch.linspace(0.1, 1, o.numel()).reshape(o.shape)).sum() for o in outputs
    )
    found = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
    return [None if g is None else g.detach().numpy() for g in (*outputs, *found)]


LAYERS = {
    "dense": (lambda: layers.Dense(4, "gelu"), X),
    "einsum": (lambda: layers.EinsumDense("abc,cd->abd", (None, 4)), SEQUENCES),
    "convolution": (lambda: layers.Conv2D(4, 3, padding="same"), IMAGES),
    "strides": (lambda: layers.Conv2D(4, 3, 2, padding="same"), IMAGES),
    "separable": (lambda: layers.SeparableConv2D(4, 3, padding="same"), IMAGES),
    "transposed": (lambda: layers.Conv2DTranspose(4, 3, 2, padding="same"), IMAGES),
    "pooling": (lambda: layers.MaxPooling2D(3, 2, padding="same"), IMAGES),
    "averages": (lambda: layers.AveragePooling2D(2), IMAGES),
    "global": (lambda: layers.GlobalMaxPooling2D(), IMAGES),
    "resize": (lambda: layers.UpSampling2D(2, interpolation="bilinear"), IMAGES),
    "padding": (lambda: layers.ZeroPadding2D(1), IMAGES),
    "reshape": (lambda: layers.Reshape((-1, 3)), IMAGES),
    "layer norm": (lambda: layers.LayerNormalization(), SEQUENCES),
    "group norm": (lambda: layers.GroupNormalization(3), IMAGES),
    "batch norm": (lambda: layers.BatchNormalization(), SEQUENCES),
    "embedding": (lambda: layers.Embedding(9, 4), IDS),
    "lstm": (lambda: layers.LSTM(4), SEQUENCES),
    "gru": (lambda: layers.GRU(4, return_sequences=True), SEQUENCES),
    "both ways": (lambda: layers.Bidirectional(layers.LSTM(3)), SEQUENCES),
    "states": (lambda: layers.LSTM(4, return_state=True), SEQUENCES),
    "distributed": (lambda: layers.TimeDistributed(layers.Dense(2)), SEQUENCES),
    "attention": (lambda: attention(), SEQUENCES),
    "causal": (lambda: attention(use_causal_mask=True), SEQUENCES),
    "mask inside": (lambda: masked(), IDS),
    "spectral": (lambda: layers.SpectralNormalization(layers.Dense(3)), X),
    "softmax": (lambda: layers.Softmax(), X),
    "dropout at rest": (lambda: layers.Dropout(0.5), X),
}


def attention(**options):
    x = keras.Input((7, 6))
    return keras.Model(x, layers.MultiHeadAttention(2, 3)(x, x, **options))


def masked():
    ids = keras.Input((7,), dtype="int64")
    embedded = layers.Embedding(9, 4, mask_zero=True)(ids)
    return keras.Model(ids, layers.GlobalAveragePooling1D()(embedded))


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_the_layer(name):
    make, x = LAYERS[name]
    keras.utils.set_random_seed(0)
    layer, calls = make(), RecordedCalls()
    layer.build(x.shape)
    x = tensor(x)
    for _ in range(3):
        with_gradients(lambda x: called(calls, layer, x), layer, x)
    assert recordings(layer, calls) == 1
    other = x.flip(0) if name == "embedding" else x.flip(0).contiguous()
    expected = with_gradients(layer, layer, other)
    found = with_gradients(lambda x: called(calls, layer, x), layer, other)
    assert len(found) == len(expected)
    for own, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, right)


def test_the_recording_reads_the_present_values_of_variables():
    layer, calls = layers.Dense(3), RecordedCalls()
    layer.build((None, 5))
    called(calls, layer, tensor(X), times=3)
    layer.set_weights([np.ones((5, 3)), np.full(3, 2.0)])
    found = called(calls, layer, tensor(X))
    np.testing.assert_allclose(
        found.detach(), X.sum(1, keepdims=True) + np.full(3, 2.0), rtol=1e-5
    )
    assert recordings(layer, calls) == 1


def test_a_recording_has_no_python_of_the_layer(monkeypatch):
    layer, calls = layers.Dense(3), RecordedCalls()
    layer.build((None, 5))
    before = called(calls, layer, tensor(X), times=3)
    count = []
    monkeypatch.setattr(layers.Dense, "call", lambda *args, **kwargs: count.append(1))
    np.testing.assert_array_equal(
        called(calls, layer, tensor(X)).detach(), before.detach()
    )
    assert not count


class Own(layers.Dense):
    pass


def own_activation(x):
    return x * 2


def with_hook():
    layer = layers.Dense(3)
    layer.register_forward_hook(lambda module, inputs, output: output + 1)
    return layer


def with_own_call():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
    model.call = lambda x, training=None, mask=None: x + 1
    return model


def rematerialized():
    with keras.RematScope("full"):
        return keras.Sequential([keras.Input((5,)), layers.Dense(3)])


DIRECT = {
    "a class of the user's": (lambda: Own(3), X, {}),
    "a function of the user's": (lambda: layers.Dense(3, own_activation), X, {}),
    "a call of the user's": (lambda: with_own_call(), X, {}),
    "a lambda": (lambda: layers.Lambda(lambda x: x + 1), X, {}),
    "random numbers": (lambda: layers.Dropout(0.5), X, {"training": True}),
    "noise": (lambda: layers.GaussianNoise(0.5), X, {"training": True}),
    "a loss": (lambda: layers.Dense(3, activity_regularizer="l2"), X, {}),
    "a mask": (lambda: layers.Embedding(9, 4, mask_zero=True), IDS, {}),
    "two precisions": (lambda: layers.Dense(3, dtype="mixed_bfloat16"), X, {}),
    "state that is assigned": (
        lambda: layers.BatchNormalization(),
        X,
        {"training": True},
    ),
    "hooks": (with_hook, X, {}),
    "rematerialization": (rematerialized, X, {}),
}


@pytest.mark.parametrize("name", DIRECT)
def test_other_calls_are_direct(name):
    make, x, options = DIRECT[name]
    layer, calls = make(), RecordedCalls()
    if not layer.built:
        layer.build(x.shape)
    called(calls, layer, tensor(x), times=6, **options)
    assert recordings(layer, calls) == 0


def test_random_numbers_differ_in_each_call():
    layer, calls = layers.Dropout(0.5), RecordedCalls()
    ones = torch.ones(100)
    found = [called(calls, layer, ones, training=True) for _ in range(5)]
    assert not any(torch.equal(one, found[0]) for one in found[1:])


def test_a_call_by_values_is_direct():
    layer, calls = layers.Embedding(9, 4), RecordedCalls()
    layer.build(())
    model = keras.Sequential([layer, layers.Masking(), layers.GRU(3)])
    for ids in (IDS, np.zeros_like(IDS), IDS[::-1].copy(), IDS * 0 + 1):
        found = called(calls, model, tensor(ids), times=3)
        np.testing.assert_array_equal(found.detach(), model(tensor(ids)).detach())


def test_attributes_that_change_are_noticed():
    inner = layers.Dense(3, "relu")
    model = keras.Sequential([keras.Input((5,)), inner])
    calls = RecordedCalls()
    called(calls, model, tensor(X), times=4)
    inner.activation = keras.activations.tanh
    np.testing.assert_array_equal(
        called(calls, model, tensor(X)).detach(), model(tensor(X)).detach()
    )
    assert recordings(model, calls) == 0
    called(calls, model, tensor(X), times=3)
    assert recordings(model, calls) == 1


def test_frozen_batch_normalization_is_noticed():
    norm = layers.BatchNormalization(center=False, scale=False)
    model = keras.Sequential([keras.Input((5,)), norm])
    calls = RecordedCalls()
    called(calls, model, tensor(X), times=4, training=True)
    norm.trainable = False
    called(calls, model, tensor(X), times=4, training=True)
    before = norm.moving_mean.numpy()
    found = called(calls, model, tensor(X), training=True)
    np.testing.assert_array_equal(
        found.detach(), model(tensor(X), training=False).detach()
    )
    np.testing.assert_array_equal(norm.moving_mean.numpy(), before)


def test_layers_that_are_added_and_removed_are_noticed():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4)])
    calls = RecordedCalls()
    called(calls, model, tensor(X), times=4)
    model.add(layers.Dense(2))
    assert called(calls, model, tensor(X), times=4).shape == (6, 2)
    model.pop()
    assert called(calls, model, tensor(X), times=4).shape == (6, 4)


def test_hooks_that_are_registered_later_are_called():
    layer, calls = layers.Dense(3), RecordedCalls()
    layer.build((None, 5))
    called(calls, layer, tensor(X), times=4)
    shapes = []
    hook = layer.register_forward_hook(lambda *args: shapes.append(args[2].shape))
    called(calls, layer, tensor(X))
    hook.remove()
    everywhere = torch.nn.modules.module.register_module_forward_hook(
        lambda *args: shapes.append(args[2].shape)
    )
    called(calls, layer, tensor(X))
    everywhere.remove()
    assert len(shapes) == 2


def test_a_transposed_input_is_another_kind_of_call():
    layer, calls = layers.Flatten(), RecordedCalls()
    x = torch.arange(24.0).reshape(4, 3, 2)
    called(calls, layer, x, times=4)
    view = torch.arange(24.0).reshape(4, 2, 3).transpose(1, 2)
    np.testing.assert_array_equal(called(calls, layer, view, times=4), layer(view))


def test_gradients_of_gradients_are_those_of_the_layer():
    layer, calls = layers.Dense(3, "tanh"), RecordedCalls()
    layer.build((None, 5))

    def second(function):
        x = tensor(X).requires_grad_()
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return torch.autograd.grad((first**2).sum(), layer.kernel.value)[0].numpy()

    for _ in range(4):
        found = second(lambda x: called(calls, layer, x))
    np.testing.assert_array_equal(found, second(layer))


def fitted(make, model_of, run_eagerly, **options):
    keras.utils.set_random_seed(0)
    strategy = make()
    with strategy.scope():
        model = model_of()
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            run_eagerly=run_eagerly,
        )
    x = np.tile(X, (5, 1))
    history = model.fit(
        x, np.tile(Y, 5), batch_size=8, epochs=3, validation_split=0.2, verbose=0
    )
    return model.get_weights(), history.history, model.predict(x, 7, verbose=0)


def small():
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8, "relu"),
            layers.Dropout(0.2),
            layers.Dense(3),
        ]
    )


def normalized():
    return keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dense(3, kernel_regularizer="l2"),
        ]
    )


@pytest.mark.parametrize("model_of", [small, normalized])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ks.OneDeviceStrategy("cpu:0"),
        lambda: ks.MirroredStrategy(["cpu:0", "cpu:1"]),
        lambda: ks.MirroredStrategy(["cpu:0", "cpu:1"]),
    ],
    ids=["one device", "mirrored", "split"],
)
def test_fit_is_that_of_run_eagerly(make, model_of):
    found, expected = (fitted(make, model_of, eager) for eager in (False, True))
    for own, right in zip(found[0], expected[0], strict=True):
        np.testing.assert_array_equal(own, right)
    assert found[1] == expected[1]
    np.testing.assert_array_equal(found[2], expected[2])


def test_fit_runs_no_python_of_layers_after_its_first_steps(monkeypatch):
    count = []
    original = layers.Dense.call

    @functools.wraps(original)
    def call(self, *args, **kwargs):
        count.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(layers.Dense, "call", call)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
        model.compile("sgd", "mse")
    x = np.tile(X, (20, 1))
    model.fit(x, x[:, :3], batch_size=8, verbose=0)
    steps = len(count)
    model.fit(x, x[:, :3], batch_size=8, epochs=2, verbose=0)
    assert len(count) == steps


def test_a_loop_runs_no_python_of_layers_after_its_first_steps(monkeypatch):
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1)

    def replica_step(x, y):
        def loss_fn():
            return ks.compute_average_loss(keras.losses.mean_squared_error(y, model(x)))

        loss, gradients = ks.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def loop():
        dataset = strategy.experimental_distribute_dataset((X, X[:, :3]), batch_size=4)
        for _ in range(5):
            for x, y in dataset:
                strategy.run(replica_step, args=(x, y))

    loop()
    monkeypatch.setattr(layers.Dense, "call", None)
    loop()


def test_copies_of_a_layer_have_no_recordings():
    model, calls = (
        keras.Sequential([keras.Input((5,)), layers.Dense(3)]),
        RecordedCalls(),
    )
    called(calls, model, tensor(X), times=4)
    again = copy.deepcopy(vars(model)["_keras_strategies_recordings"])
    assert not again.by_owner
    cloned = keras.models.clone_model(model)
    assert "_keras_strategies_recordings" not in vars(cloned)


def test_a_recorded_model_is_collected():
    model, calls = (
        keras.Sequential([keras.Input((5,)), layers.Dense(3)]),
        RecordedCalls(),
    )
    called(calls, model, tensor(X), times=4)
    found = weakref.ref(model)
    del model
    gc.collect()
    assert found() is None
