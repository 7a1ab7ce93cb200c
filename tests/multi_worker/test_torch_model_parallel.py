"""`ModelParallelStrategy` on Torch: variables are DTensors, a process per device."""

from __future__ import annotations

import contextlib
import functools
from unittest import mock

import keras
import numpy as np
import pytest
from harness.training import (
    alone,
    as_arrays,
    assert_same,
    compiled,
    fit_evaluate_predict,
    state_of,
)
from model_parallel import model_parallel_cases
from multi_worker.torch_shards import cut, fit, network, rows

import keras_strategies as ks

TORCH = keras.backend.backend() == "torch"
pytestmark = pytest.mark.skipif(not TORCH, reason="DTensors are Torch's")

CASES = {case.name: case for case in model_parallel_cases.CASES}
# The layout of variables, and the devices along the model axis.
GRIDS = {
    "model_1x2": ("auto", 2, "two"),
    "model_2x1": ("auto", 1, "two"),
    "fsdp_2": ("fsdp", 1, "two"),
    "model_2x2": ("auto", 2, "four"),
    "fsdp_2x2": ("fsdp", 2, "four"),
}


def _parameters():
    for name, grid in GRIDS.items():
        for i, case in enumerate(CASES):
            fast = grid[2] == "two" and (i - list(GRIDS).index(name)) % 3 == 0
            fast = fast or (case == "transformer_adam" and name == "model_2x2")
            marks = [] if fast else [pytest.mark.nightly]
            yield pytest.param(case, *grid, marks=marks, id=f"{case}-{name}")


def train_cut(strategy, name, layout_map, width):
    from torch.distributed.tensor import DTensor

    case = CASES[name]
    own = cut(layout_map, width)
    with own.scope():
        model = compiled(case)
    script = case.script or fit_evaluate_predict
    results = script(case, model, case.make_data())
    results |= state_of(model)
    parts = sum(isinstance(weight.value, DTensor) for weight in model.weights)
    return as_arrays(results), parts


@pytest.mark.nightly(
    unless=["global_clipnorm_ema-model_2x1", "accumulation-fsdp_2", "eager-fsdp_2"]
)
@pytest.mark.parametrize(
    ("name", "layout_map", "width", "cluster"),
    list(_parameters()),
    indirect=["cluster"],
    scope="session",
)
def test_same_as_one_device(cluster, name, layout_map, width):
    case = CASES[name]
    found = cluster(train_cut, name, layout_map, width)
    for index, (results, parts) in enumerate(found):
        assert_same(alone(case), results, case.tolerance, f"worker {index}")
        is_cut = layout_map == "fsdp" or width > 1
        assert (parts > 1) == is_cut


def test_each_process_keeps_its_parts(cluster):
    def program(strategy):
        own = cut()
        model = network(own)
        fit(model)
        kernel = model.weights[0]
        slots = [v for v in model.optimizer.variables if "dense_kernel" in v.path]
        slots = slots or [v for v in model.optimizer.variables if v.shape == (8, 16)]
        shapes = [tuple(v.value.to_local().shape) for v in (kernel, *slots)]
        gathered = kernel.numpy()
        description = own.describe(model)
        variables = [*model.variables, *model.optimizer.variables]
        whole = sum(
            int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in variables
        )
        return shapes, gathered, str(description), description.totals, whole, repr(own)

    found = cluster(program)
    for index, (shapes, gathered, text, totals, whole, name) in enumerate(found):
        assert shapes == [(8, 8)] * 3
        np.testing.assert_array_equal(gathered, found[0][1])
        assert "(-, batch)" in text
        assert name == (
            f"<ModelParallelStrategy 'fsdp', 2 batch, on cpu:0, worker {index} of 2>"
        )
        # All but the dropout's seed, counters and metrics is in two parts.
        assert whole / 2 <= totals["cpu:0"] < whole / 2 + 200


def test_random_numbers_are_those_of_one_device(cluster):
    """Rows have the masks that they have where one device draws all of them."""
    expected = fit(network(ks.OneDeviceStrategy("cpu:0")))
    for layout_map, width in (("fsdp", 1), ("auto", 2)):

        def program(strategy, layout_map=layout_map, width=width):
            return fit(network(cut(layout_map, width)))

        for losses in cluster(program):
            np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_train_step_of_the_users(cluster):
    class Penalized(keras.Model):
        """Gradients of inputs, and a loss that Keras does not know."""

        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(8, "tanh")
            self.last = keras.layers.Dense(4)

        def call(self, x):
            return self.last(self.dense(x))

        def train_step(self, batch):
            import torch

            x, y = map(keras.ops.convert_to_tensor, batch[:2])
            x = x.detach().requires_grad_()
            self.zero_grad()
            outputs = self(x)
            loss = ((outputs - y) ** 2).max(axis=0).values.sum()
            (slope,) = torch.autograd.grad(loss, x, retain_graph=True)
            loss.backward()
            gradients = [v.value.grad for v in self.trainable_weights]
            with torch.no_grad():
                self.optimizer.apply(gradients, self.trainable_weights)
            return {"loss": loss.detach(), "slope": slope.abs().sum()}

    def train(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Penalized()
            model(np.zeros((1, 8), "float32"))
            model.compile(keras.optimizers.SGD(0.01))
        x, y = rows()
        logs = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
        logs["one"] = [model.train_on_batch(x[:7], y[:7], return_dict=True)["loss"]]
        logs["weights"] = model.get_weights()
        return logs

    expected = train(ks.get_strategy())
    for layout_map, width in (("fsdp", 1), ("auto", 2)):

        def program(strategy, layout_map=layout_map, width=width):
            return train(cut(layout_map, width))

        for found in cluster(program):
            weights = zip(found.pop("weights"), expected["weights"], strict=True)
            for one, other in weights:
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
            for key, values in found.items():
                np.testing.assert_allclose(values, expected[key], rtol=1e-5)


def test_a_variable_that_a_call_reads_after_it_has_assigned_it(cluster):
    class Counting(keras.layers.Layer):
        def build(self, shape):
            self.counts = self.add_weight(
                shape=(8, 8), initializer="zeros", trainable=False
            )

        def call(self, x):
            before = self.counts.value  # It is kept until the call ends.
            self.counts.assign(self.counts + 1.0)
            outputs = x * keras.ops.mean(self.counts.value)
            del before
            return outputs

    def train(scope):
        keras.utils.set_random_seed(3)
        with scope:
            model = keras.Sequential(
                [keras.Input((8,)), Counting(), keras.layers.Dense(4)]
            )
            model.compile("sgd", "mse")
        return as_arrays({"loss": fit(model)} | state_of(model))

    expected = train(contextlib.nullcontext())

    def program(strategy):
        return train(cut().scope())

    for found in cluster(program):
        assert_same(expected, found, 1e-5, "fsdp")


class Scaled(keras.layers.Dense):
    def call(self, x):
        import torch

        with torch.no_grad():
            kernel = self.kernel.value  # It is kept until the call ends.
            norm = torch.linalg.norm(kernel)
        outputs = super().call(x) / norm
        del kernel
        return outputs


class Penalized(keras.Model):
    """A penalty on gradients: gradients of gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Scaled(8, "tanh"), keras.layers.Dense(4)

    def call(self, x):
        return self.last(self.first(x))

    def train_step(self, batch):
        import torch

        x, y = map(keras.ops.convert_to_tensor, batch[:2])
        x = x.detach().requires_grad_()
        self.zero_grad()
        outputs = self(x)
        (slopes,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        loss = ((outputs - y) ** 2).mean() + (slopes**2).sum()
        loss.backward()
        gradients = [v.value.grad for v in self.trainable_weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss.detach()}


def train_penalized(scope):
    keras.utils.set_random_seed(3)
    with scope:
        model = Penalized()
        model(np.zeros((1, 8), "float32"))
        model.compile(keras.optimizers.SGD(0.01))
    return as_arrays({"loss": fit(model)} | state_of(model))


@pytest.mark.parametrize(("layout_map", "width"), [("fsdp", 1), ("auto", 2)])
def test_gradients_of_gradients(cluster, layout_map, width):
    """A weight is read without gradients and with them."""
    expected = train_penalized(contextlib.nullcontext())

    def program(strategy):
        return train_penalized(cut(layout_map, width).scope())

    for found in cluster(program):
        assert_same(expected, found, 1e-4, layout_map)


def language_model(is_rematerialized):
    """Token embeddings with two uses each, attention, dropout."""
    keras.utils.set_random_seed(1)
    remat = keras.RematScope(mode="full" if is_rematerialized else None)
    with remat:
        tokens = keras.Input((6,), dtype="int32")
        x = keras.layers.Embedding(41, 16)(tokens)
        for _ in range(2):
            y = keras.layers.LayerNormalization()(x)
            y = keras.layers.MultiHeadAttention(2, 8)(y, y)
            x = x + keras.layers.Dropout(0.1)(y)
            y = keras.layers.Dense(32, "gelu")(keras.layers.LayerNormalization()(x))
            x = x + keras.layers.Dense(16)(y)
        model = keras.Model(tokens, keras.layers.Dense(41)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Adam would divide the gradients of biases of keys, which are zero, by themselves.
    model.compile(keras.optimizers.SGD(0.1, 0.9), loss)
    return model


def fit_language_model(scope, is_rematerialized):
    with scope:
        model = language_model(is_rematerialized)
    ids = np.random.default_rng(0).integers(0, 41, (20, 6))
    options = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(ids, np.roll(ids, 1, 1), **options)
    return as_arrays(history.history | state_of(model))


@pytest.mark.nightly(unless=["two-False"])
@pytest.mark.parametrize("is_rematerialized", [False, True])
def test_a_language_model_with_and_without_remat(cluster, is_rematerialized):
    # Dropout of Keras 3.16 draws another mask when it is computed again.
    scope = ks.OneDeviceStrategy("cpu:0").scope()
    expected = fit_language_model(scope, is_rematerialized)
    for layout_map, width in (("fsdp", 1), ("auto", 2)):

        def program(strategy, layout_map=layout_map, width=width):
            return fit_language_model(cut(layout_map, width).scope(), is_rematerialized)

        for found in cluster(program):
            assert_same(expected, found, 1e-4, layout_map)


@pytest.mark.nightly(unless=["two-None"])
@pytest.mark.parametrize("layout_map", ["fsdp", None])
def test_a_rematerialized_model_in_a_model(cluster, layout_map):
    """The model itself is computed again too, and calls its layers then."""

    def train(scope):
        keras.utils.set_random_seed(3)
        with scope, keras.RematScope("full"):
            model = keras.Sequential([keras.Input((8,))])
            for _ in range(3):
                model.add(keras.layers.Dense(8, "gelu"))
            model.add(keras.layers.Dense(4))
            model.compile(keras.optimizers.SGD(0.1), "mse")
        return as_arrays({"loss": fit(model)} | state_of(model))

    expected = train(contextlib.nullcontext())

    def program(strategy):
        return train((cut(layout_map) if layout_map else strategy).scope())

    for found in cluster(program):
        assert_same(expected, found, 1e-5, str(layout_map))


def gathers_of_steps(steps):
    """What happens to weights in steps of four layers, each in a pack of its own.

    Returns:
        For each of the steps when a gather begins, ends, and when its weight is read;
        the most weights that are in memory when a gather begins; and those left.
    """
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef

    from keras_strategies.engines.torch.model_parallel.call_weights import CallWeights
    from keras_strategies.engines.torch.model_parallel.weight_packs import (
        Gather,
        WeightPack,
    )

    options = ks.CommunicationOptions(bytes_per_pack=256)
    own = ks.ModelParallelStrategy(
        "fsdp", ["cpu:0"], min_shard_bytes=0, communication_options=options
    )
    keras.utils.set_random_seed(3)
    with own.scope():
        model = keras.Sequential([keras.Input((8,))])
        for _ in range(4):
            model.add(keras.layers.Dense(8, "tanh", use_bias=False))
        model.compile("sgd", "mse")
    places = {id(weight): i for i, weight in enumerate(model.weights, 1)}
    events, live, memories = [], [], []

    def begins(pack, dtype):
        live.append(sum(not memory.expired() for memory in memories))
        gather = begin(pack, dtype)
        memories.append(StorageWeakRef(gather.every.untyped_storage()))
        events.append(f"begin {places[id(pack.variables[0])]}")
        return gather

    def ends(gather):
        values = end(gather)
        memories.extend(
            StorageWeakRef(value.untyped_storage()) for value in values.values()
        )
        events.append(f"end {places[id(gather.pack.variables[0])]}")
        return values

    def reads(call, variable, dtype):
        value = read(call, variable, dtype)
        events.append(f"read {places[id(variable)]}")
        return value

    begin, end, read = WeightPack.gather, Gather.values, CallWeights._value
    x = torch.zeros((8, 8))
    found = []
    with (
        mock.patch.object(WeightPack, "gather", begins),
        mock.patch.object(Gather, "values", ends),
        mock.patch.object(CallWeights, "_value", reads),
    ):
        for _ in range(steps):
            model.fit(x, x, batch_size=8, verbose=0)
            found.append(" ".join(events))
            events.clear()
    left = sum(not memory.expired() for memory in memories)
    return found, max(live), left


def test_gathered_weights_are_freed_after_their_operations(cluster):
    """Two packs are in memory, the next one is gathered while one is used."""

    def program(strategy):
        return gathers_of_steps(2)

    for (first, second), live, left in cluster(program):
        # The first weight has no part in the backward pass: inputs have no gradients.
        backward = "read 4 read 3 begin 2 end 2 read 2"
        assert first == (
            "begin 1 end 1 read 1 begin 2 end 2 read 2 begin 3 end 3 read 3 "
            f"begin 4 end 4 read 4 {backward}"
        )
        assert second == (
            "begin 1 end 1 begin 2 read 1 end 2 begin 3 read 2 end 3 begin 4 read 3 "
            "end 4 read 4 read 4 begin 2 read 3 end 2 read 2"
        )
        assert live <= 2
        assert left == 0


@pytest.mark.parametrize(("layout_map", "width"), [("fsdp", 1), ("auto", 2)])
def test_run_with_weights_in_shards(cluster, layout_map, width):
    """Rows that do not divide, batch normalization, a norm of all gradients."""

    def train(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((8,)),
                    keras.layers.Dense(16, "tanh"),
                    keras.layers.BatchNormalization(),
                    keras.layers.Dense(4),
                ]
            )
            optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5)
            optimizer.build(model.trainable_variables)
            seen = keras.metrics.Mean()

        def step(x, y):
            def loss_of():
                return keras.ops.sum((model(x, training=True) - y) ** 2)

            variables = model.trainable_variables
            loss, gradients = ks.value_and_grad(loss_of, variables)()
            optimizer.apply(gradients, variables)
            seen.update_state(loss / 7)

        x, y = (keras.ops.convert_to_tensor(each) for each in rows())
        count = strategy.num_replicas_in_sync
        for start in (0, 7, 15):
            places = np.linspace(start, start + 7, count + 1).round().astype(int)

            def own(ctx, of, places=places):
                i = ctx.replica_id_in_sync_group
                return of[places[i] : places[i + 1]]

            parts = [
                strategy.experimental_distribute_values_from_function(
                    functools.partial(own, of=each)
                )
                for each in (x, y)
            ]
            strategy.run(step, args=tuple(parts))
        weights = [keras.ops.convert_to_numpy(w) for w in model.weights]
        return weights, float(seen.result()) * count

    expected, mean = train(ks.OneDeviceStrategy("cpu:0"))

    def program(strategy):
        return train(cut(layout_map, width))

    for weights, found in cluster(program):
        np.testing.assert_allclose(found, mean, rtol=1e-5)
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


class Watching(keras.Model):
    """Records the rows of its outputs that this process has."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(8, "tanh", name="first")
        self.dropout = keras.layers.Dropout(0.5)
        self.second = keras.layers.Dense(12, "tanh", name="second")
        self.third = keras.layers.Dense(4, name="third")
        self.rows = []

    def call(self, x):
        return self.third(self.second(self.dropout(self.first(x))))

    def train_step(self, data):
        outputs = self(data[0], training=True)
        parts = getattr(outputs, "parts", [outputs])
        self.rows.append(sum(len(part) for part in parts))
        return super().train_step(data)


@pytest.mark.parametrize("cluster", ["four"], indirect=True, scope="session")
def test_a_layout_map_with_both_axes(cluster):
    """Shards over all processes; of 7 rows, three processes have two each."""
    layouts = {
        ".*first/kernel": ("model", "batch"),
        ".*second/kernel": (None, "model"),
        ".*third/kernel": ("batch",),
        ".*second/bias": ("model",),
    }

    def train(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = Watching()
            model(np.zeros((1, 8), "float32"))
            model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse")
        x, y = rows()
        history = model.fit(x, y, batch_size=15, epochs=2, shuffle=False, verbose=0)
        results = as_arrays(history.history | state_of(model))
        shapes = (
            [
                tuple(w.value.to_local().shape)
                for w in model.weights
                if "kernel" in w.path
            ]
            if strategy.num_replicas_in_sync > 1
            else []
        )
        return results, list(model.rows), shapes

    expected, _, _ = train(ks.OneDeviceStrategy("cpu:0"))

    def program(strategy):
        return train(ks.ModelParallelStrategy(layouts, ["cpu:0"], 2))

    found = cluster(program)
    for results, _, shapes in found:
        assert_same(expected, results, 1e-4, "both axes")
        assert shapes == [(8, 2), (8, 3), (3, 4)]
    own = [of for _, of, _ in found]
    assert [sum(each) for each in zip(*own, strict=True)] == [15, 7, 15, 7]
    assert max(max(each) for each in own) == 4


def test_a_layout_that_names_a_model_axis_of_one_device(cluster):
    def train(strategy):
        model = network(strategy, rate=0.0)
        return fit(model), type(model.layers[0].kernel.value).__name__

    expected, _ = train(ks.OneDeviceStrategy("cpu:0"))

    def program(strategy):
        layouts = {".*/kernel": ("batch", "model"), ".*/bias": ("model",)}
        return train(ks.ModelParallelStrategy(layouts, ["cpu:0"], 1))

    for found, kind in cluster(program):
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert kind == "DTensor"


def test_the_chief_decides_where_values_differ(cluster):
    def program(strategy):
        with cut().scope():
            weight = keras.Variable(np.zeros((4, 6), "float32"))
        index = strategy.workers.group.index
        weight.assign(np.full((4, 6), 1.0 + index, "float32"))
        return keras.ops.convert_to_numpy(weight)

    for found in cluster(program):
        np.testing.assert_array_equal(found, np.ones((4, 6)))
