"""`ModelParallelStrategy` on Torch: variables are DTensors, a process per device."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_same, assert_workers, state_of
from keras import layers
from multi_worker.clusters import model_parallel, on_clusters, one_device
from multi_worker.shards import BOTH_LAYOUTS, fit, network, rows
from verification import planted_in_fit

import keras_strategies as ks

TORCH = keras.backend.backend() == "torch"
pytestmark = pytest.mark.skipif(not TORCH, reason="DTensors are Torch's")


@pytest.mark.nightly
@BOTH_LAYOUTS
def test_verification_finds_what_is_wrong_only(cluster, layout_map, width):
    def program(strategy):
        own, data = model_parallel(layout_map, width), planted_in_fit.data
        sound = ks.verify(planted_in_fit.dense, data, own, steps=3)
        build = functools.partial(planted_in_fit.dense, kind=planted_in_fit.DividedLoss)
        wrong = ks.verify(build, data, own, steps=1)
        return sound.equal, str(sound), wrong.cause

    for is_equal, text, cause in cluster(program):
        assert is_equal, text
        assert cause == "scaled_by_replicas"


def test_each_process_keeps_its_parts(cluster):
    def program(strategy):
        own = model_parallel()
        model = network(own)
        fit(model)
        variables = [*model.variables, *model.optimizer.variables]
        shapes = [tuple(v.value.to_local().shape) for v in variables if v.ndim == 2]
        sizes = [np.prod(v.shape) * np.dtype(v.dtype).itemsize for v in variables]
        with own.scope():
            decided = keras.Variable(np.zeros((4, 6), "float32"))
        # The chief decides where values differ.
        index = strategy.workers.group.index
        decided.assign(np.full((4, 6), 1.0 + index, "float32"))
        values = model.weights[0].numpy(), keras.ops.convert_to_numpy(decided)
        return shapes, values, own.describe(model), sum(sizes), repr(own)

    found = cluster(program)
    for index, (shapes, values, description, whole, name) in enumerate(found):
        kernel, decided = values
        assert sorted(shapes) == [(8, 4)] * 3 + [(8, 8)] * 3
        np.testing.assert_array_equal(kernel, found[0][1][0])
        np.testing.assert_array_equal(decided, np.ones((4, 6)))
        assert "(-, batch)" in str(description)
        assert name == (
            f"<ModelParallelStrategy 'fsdp', 2 batch, on cpu:0, worker {index} of 2>"
        )
        # All but the dropout's seed, counters and metrics is in two parts.
        assert whole / 2 <= description.totals["cpu:0"] < whole / 2 + 200


# Models whose code reads weights in ways of its own.


class Counting(layers.Layer):
    """Reads a variable after it has assigned it."""

    def build(self, shape):
        options = {"initializer": "zeros", "trainable": False}
        self.counts = self.add_weight(shape=(8, 8), **options)

    def call(self, x):
        before = self.counts.value  # It is kept until the call ends.
        self.counts.assign(self.counts + 1.0)
        outputs = x * keras.ops.mean(self.counts.value)
        del before
        return outputs


class Scaled(layers.Dense):
    """Reads its kernel without gradients and with them."""

    def call(self, x):
        import torch

        with torch.no_grad():
            kernel = self.kernel.value  # It is kept until the call ends.
            norm = torch.linalg.norm(kernel)
        outputs = super().call(x) / norm
        del kernel
        return outputs


class Penalized(keras.Model):
    """Gradients of inputs, of second order too, and a loss that Keras does not know."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Scaled(8, "tanh"), layers.Dense(4)

    def call(self, x):
        return self.last(self.first(x))

    def train_step(self, batch):
        import torch

        x, y = map(keras.ops.convert_to_tensor, batch[:2])
        x = x.detach().requires_grad_()
        self.zero_grad()
        outputs = self(x)
        (slopes,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        loss = ((outputs - y) ** 2).max(axis=0).values.sum() + (slopes**2).sum()
        loss.backward()
        gradients = [v.value.grad for v in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss.detach(), "slope": slopes.detach().abs().sum()}


def penalized():
    model = Penalized()
    model(np.zeros((1, 8), "float32"))
    return model


def rematerialized():
    """The model itself is computed again too, and calls its layers then."""
    with keras.RematScope("full"):
        hidden = [layers.Dense(8, "gelu") for _ in range(3)]
        return keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(4)])


def counting():
    return keras.Sequential([keras.Input((8,)), Counting(), layers.Dense(4)])


MODELS = {each.__name__: each for each in (counting, penalized, rematerialized)}


def train_model(strategy, name):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = MODELS[name]()
        model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = rows()
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    one = model.train_on_batch(x[:7], y[:7], return_dict=True)["loss"]
    return as_arrays({**history, "one": one} | state_of(model))


@BOTH_LAYOUTS
@pytest.mark.parametrize("name", MODELS)
def test_code_that_reads_weights(cluster, name, layout_map, width):
    expected = train_model(one_device(), name)
    found = cluster(
        lambda strategy: train_model(model_parallel(layout_map, width), name)
    )
    assert_workers(expected, found, 1e-4)
    if name == "rematerialized":
        found = cluster(lambda strategy: train_model(strategy, name))
        assert_workers(expected, found, 1e-4)


class Watching(keras.Model):
    """Records the rows of its outputs that this process has."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(8, "tanh", name="first")
        self.dropout = layers.Dropout(0.5)
        self.second = layers.Dense(12, "tanh", name="second")
        self.third = layers.Dense(4, name="third")
        self.rows = []

    def call(self, x):
        return self.third(self.second(self.dropout(self.first(x))))

    def train_step(self, data):
        outputs = self(data[0], training=True)
        parts = getattr(outputs, "parts", [outputs])
        self.rows.append(sum(len(part) for part in parts))
        return super().train_step(data)


def train_watching(strategy):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = Watching()
        model(np.zeros((1, 8), "float32"))
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse")
    x, y = rows()
    history = model.fit(x, y, batch_size=15, epochs=2, shuffle=False, verbose=0)
    return as_arrays(history.history | state_of(model)), list(model.rows), model


@on_clusters("four")
def test_a_layout_map_with_both_axes(cluster):
    """Shards over all processes; of 7 rows, three processes have two each."""
    layouts = {
        ".*first/kernel": ("model", "batch"),
        ".*second/kernel": (None, "model"),
        ".*third/kernel": ("batch",),
        ".*second/bias": ("model",),
    }

    def program(strategy):
        own = ks.ModelParallelStrategy(layouts, ["cpu:0"], 2)
        results, seen, model = train_watching(own)
        kernels = [w.value for w in model.weights if "kernel" in w.path]
        return results, seen, [tuple(value.to_local().shape) for value in kernels]

    expected, *_ = train_watching(one_device())
    found = cluster(program)
    for results, _, shapes in found:
        assert_same(expected, results, 1e-4, "both axes")
        assert shapes == [(8, 2), (8, 3), (3, 4)]
    own = [seen for _, seen, _ in found]
    assert [sum(each) for each in zip(*own, strict=True)] == [15, 7, 15, 7]
    assert max(max(each) for each in own) == 4
