"""Torch: weights in shards in code around layers, optimizers, errors, plans.

Optimizers of Torch step in `run`, as in a script for DDP, with weights in shards too.
"""

from __future__ import annotations

import time

import keras
import numpy as np
import pytest
from harness.training import as_arrays, assert_arrays, assert_workers, state_of
from multi_worker.clusters import (
    assert_as_one_device,
    model_parallel,
    one_device,
    own_cluster,
    with_clusters,
)
from multi_worker.shards import BOTH_LAYOUTS, fit

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("shards of Torch", allow_module_level=True)

import torch
from harness.torch_loops import batches, distributed, gradients, loss_of, make_model

#: By the kind of operation, a number of a weight of shape (8, 4). Rows are divided.
OPERATIONS = {
    "entries": lambda w: (w * w.abs() + 0.5 * w).sum(),
    "comparison": lambda w: torch.where(w > 0.1, w, -w).sum(),
    "another of its shape": lambda w: (w * full()).sum(),
    "a row for all": lambda w: (w * full()[:1]).sum(),
    "sum of rows": lambda w: (w.sum(0) ** 2).max(),
    "mean": lambda w: w.mean(),
    "norm": lambda w: torch.linalg.vector_norm(w),
    "product": lambda w: (w.T @ w).diagonal().sum(),
    "shape": lambda w: (w.reshape(4, 8)[1] * w.flatten()[:8]).sum(),
    "order": lambda w: (w.sort(0).values * full()).sum(),
    "rows by number": lambda w: (w[torch.tensor([5, 0, 5])] ** 3).sum(),
    "joined": lambda w: torch.cat([w, 2 * w[:3]]).square().mean(),
    "gradient of a gradient": lambda w: slope(w).square().sum(),
    "random numbers": lambda w: (w * torch.rand_like(w)).sum(),
}


def full():
    return torch.arange(32.0).reshape(8, 4) / 7


def slope(w):
    return torch.autograd.grad((w**3).sum(), w, create_graph=True)[0]


def computed(strategy):
    with strategy.scope():
        kernel = keras.layers.Dense(4, use_bias=False)
        kernel.build((None, 8))
        kernel.set_weights([np.random.default_rng(1).normal(size=(8, 4)) / 3])
        value, found = kernel.kernel.value, {}
        for name, operation in OPERATIONS.items():
            torch.manual_seed(5)
            result = operation(value)
            (gradient,) = torch.autograd.grad(result, value)
            both = (result.detach(), gradient)
            found[name] = [keras.ops.convert_to_numpy(each) for each in both]
    return as_arrays(found), value


def test_operations_and_their_gradients(cluster):
    def program(strategy):
        found, value = computed(model_parallel())
        assert value.to_local().shape == (4, 4)
        return found

    expected, _ = computed(one_device())
    assert_workers(expected, cluster(program), 1e-6)


#: Those that update shards, and those that need full weights.
OPTIMIZERS = {
    **{
        name: {"gradient_accumulation_steps": 2}
        for name in ("SGD", "AdamW", "Nadam", "Adagrad")
    },
    "Adafactor": {"clipnorm": 0.02},
    "Muon": {"global_clipnorm": 0.02},
    "Lamb": {"clipvalue": 0.02},
}


def trained(strategy, name, is_built_outside=False):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    optimizer = getattr(keras.optimizers, name)(0.01, **OPTIMIZERS[name])
    if is_built_outside:
        # Its slots are no shards, and are updated with the weights' full values.
        optimizer.build(model.trainable_variables)
    with strategy.scope():
        model.compile(optimizer, "mse")
    return as_arrays({"loss": fit(model)} | state_of(model))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(cluster, name):
    def program(strategy, is_built_outside):
        own = model_parallel() if strategy.workers else strategy
        return trained(own, name, is_built_outside)

    for is_built_outside in (False, True):
        assert_as_one_device(cluster, program, is_built_outside)


def test_what_cannot_be(cluster):
    def program(strategy):
        with pytest.raises(RuntimeError, match="needs its own process"):
            ks.ModelParallelStrategy("fsdp", ["cpu:0", "cpu:1"])

    cluster(program)
    # A process alone is told how to start.
    text = r"(?s)without a cluster.* launch --workers N"
    with pytest.raises(RuntimeError, match=text):
        ks.ModelParallelStrategy("fsdp", ["cpu:0"])


class FailingModel(keras.Sequential):
    """Raises an error in the steps of one process."""

    fails = False

    def train_step(self, data):
        if self.fails:
            raise OSError("the disk is full")
        return super().train_step(data)


@pytest.mark.nightly(unless=["step"])
@pytest.mark.parametrize("place", ["callback", "step"])
def test_an_error_in_one_process_is_named_in_the_others(forker, place):
    """Soon: the others wait for the decisions of callbacks, or for a collective."""

    def program(strategy):
        index = strategy.workers.group.index

        class Failing(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if index == 1 and batch == 1:
                    if place == "callback":
                        raise OSError("the disk is full")
                    self.model.fails = True

        with model_parallel().scope():
            model = FailingModel([keras.Input((8,)), keras.layers.Dense(4)])
            model.compile("sgd", "mse")
        fit(model)
        start = time.monotonic()
        with pytest.raises(OSError if index else ks.errors.WorkerError) as caught:
            fit(model, [Failing()])
        return str(caught.value), time.monotonic() - start

    with own_cluster(forker) as cluster:
        (one, seconds), (other, _) = cluster(program)
    assert "the disk is full" in other
    assert "Worker 1" in one and "the disk is full" in one
    # Their timeout is 60 seconds.
    assert seconds < 20


@pytest.mark.nightly(unless=["two-auto-2"])
@BOTH_LAYOUTS
def test_a_plan_has_the_bytes_and_the_peak_of_a_step(cluster, layout_map, width):
    """Wide layers: shards, packs of weights and activations all count."""

    def program(strategy):
        from keras_strategies.engines.torch.compat import memory_tracker, tracked_bytes

        options = ks.CommunicationOptions(bytes_per_pack=2**18)
        own = ks.ModelParallelStrategy(
            *(layout_map, ["cpu:0"], width),
            min_shard_bytes=0,
            communication_options=options,
        )

        def build():
            hidden = [keras.layers.Dense(256, "gelu") for _ in range(6)]
            model = keras.Sequential([keras.Input((256,)), *hidden])
            model.compile("adam", "mse")
            return model

        plan = own.plan(build, ((512, 256), (512, 256)))
        with own.scope():
            model = build()
        x = np.zeros((512, 256), "float32")
        model.fit(x, x, batch_size=512, verbose=0)
        with memory_tracker() as tracker:
            model.fit(x, x, batch_size=512, verbose=0)
        state = own.describe(model).totals["cpu:0"]
        kinds = ("weight", "slot", "metric")
        planned = sum(plan.bytes_per_device(kind)["cpu:0"] for kind in kinds)
        assert planned == state and plan.sent > 0
        assert "reduce-scatter of gradients" in str(plan)
        return plan.peak, tracked_bytes(tracker, "peak") + state

    for planned, found in cluster(program):
        assert planned == pytest.approx(found, rel=0.15)


def test_what_fits_into_the_memory_of_a_device(cluster):
    """Wide layers in shards; many rows by accumulation; the numbers of one device."""

    def build():
        hidden = [keras.layers.Dense(64, "gelu") for _ in range(4)]
        model = keras.Sequential([keras.Input((64,)), *hidden])
        model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
        return model

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(64, 64)).astype("float32") for _ in range(2))

    def weights(model, batch_size):
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        return model.get_weights()

    keras.utils.set_random_seed(3)
    with one_device().scope():
        model = build()
    expected = weights(model, 64)

    def program(strategy):
        def fit_into(memory):
            return ks.fit_into(
                memory, build, ((64, 64), (64, 64)), ["cpu:0"], min_shard_bytes=0
            )

        ample = fit_into("1 GiB")
        least = min(each.peak for each in ample.tried if each.peak is not None)
        chosen = fit_into(least - 1)
        keras.utils.set_random_seed(3)
        found = weights(chosen.make_model(build), chosen.batch_size)
        return ample.choice.layout, chosen.choice, found

    for layout, choice, found in cluster(program):
        assert layout == "replicated"
        assert choice.rematerializes or choice.accumulation_steps > 1
        assert_arrays(found, expected, 1e-4, 1e-6)


# Optimizers of Torch in `run`, as in a script for DDP.


def train(strategy, inside, rate=0.1):
    """Two backward passes for a step, in `run` or outside; clipped, with a penalty."""
    model = make_model(strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    seen = []

    def backward(x, y, rows):
        loss = loss_of(model, x, y, rows)
        if rate:
            squares = sum(p.pow(2).sum() for p in model.parameters())
            loss = loss + rate * squares * len(x) / rows
        loss.backward()

    def update():
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return float(norm)

    def last(x, y, rows):
        backward(x, y, rows)
        seen.append(update())

    for i, (x, y) in enumerate(batches()):
        step = last if inside and i % 2 else backward
        if strategy is None:
            step(torch.from_numpy(x), torch.from_numpy(y), len(x))
        else:
            own = [distributed(strategy, each) for each in (x, y)]
            strategy.run(step, args=(*own, len(x)))
        if i == 0:
            # Torch sorts parameters by name, where dense_10 is before dense_9.
            seen += sorted(np.abs(g).sum() for g in gradients(model))
        if i % 2 and not inside:
            seen.append(update())
    weights = [keras.ops.convert_to_numpy(w) for w in model.weights]
    return weights, list(dict.fromkeys(np.round(seen, 5).tolist()))


@with_clusters(
    "cluster how",
    [
        *(("two", how) for how in ("inside", "outside", "shards")),
        *(("two_by_two", how) for how in ("inside", "outside")),
    ],
)
def test_an_optimizer_of_torch_steps_as_on_one_device(cluster, how):
    arguments = (how != "outside", 0 if how == "shards" else 0.1)

    def program(strategy):
        return train(model_parallel() if how == "shards" else strategy, *arguments)

    expected, expected_norms = train(None, *arguments)
    for weights, norms in cluster(program):
        np.testing.assert_allclose(norms, expected_norms, rtol=1e-4)
        assert_arrays(weights, expected, 1e-4, 1e-6)
