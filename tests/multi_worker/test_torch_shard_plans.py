"""Torch: plans of models in shards, their peaks, and what fits into a device."""

from __future__ import annotations

from unittest import mock

import keras
import numpy as np
import pytest
from multi_worker.torch_shards import cut

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("shards of Torch", allow_module_level=True)


@pytest.mark.parametrize(("layout_map", "width"), [("fsdp", 1), ("auto", 2)])
def test_a_plan_says_what_then_is(cluster, layout_map, width):
    def program(strategy):
        own = cut(layout_map, width)

        def build():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16)])
            model.compile("adam", "mse")
            return model

        plan = own.plan(build, ((8, 8), (8, 16)))
        with own.scope():
            model = build()
        x = np.zeros((8, 8))
        model.fit(x, np.zeros((8, 16)), batch_size=8, verbose=0)
        kinds = ("weight", "slot", "metric")
        planned = sum(plan.bytes_per_device(kind)["cpu:0"] for kind in kinds)
        return planned, own.describe(model).totals["cpu:0"], plan.sent, str(plan)

    for planned, found, sent, text in cluster(program):
        assert planned == found
        assert "peak of a step per device" in text
        assert sent > 0
        assert "reduce-scatter of gradients" in text


@pytest.mark.nightly(unless=["two-fsdp-1-2", "two-auto-2-2"])
@pytest.mark.parametrize("layers", [2, 6])
@pytest.mark.parametrize(("layout_map", "width"), [("fsdp", 1), ("auto", 2)])
def test_a_plan_counts_what_a_step_sends(cluster, layout_map, width, layers):
    """Weights that fit two packs are gathered once, others again backward."""

    def program(strategy):
        from keras_strategies.engines.torch.worker_collectives import (
            TorchCommunicator as Workers,
        )

        own = ks.ModelParallelStrategy(
            layout_map,
            ["cpu:0"],
            width,
            min_shard_bytes=0,
            communication_options=ks.CommunicationOptions(bytes_per_pack=2**14),
        )

        def build():
            model = keras.Sequential([keras.Input((64,))])
            model.add(keras.layers.Dense(64, trainable=False))
            for _ in range(layers):
                model.add(keras.layers.Dense(64))
            model.compile("sgd", "mse")
            return model

        plan = own.plan(build, ((8, 64), (8, 64)))
        with own.scope():
            model = build()
        x = np.zeros((8, 64), "float32")
        model.fit(x, x, batch_size=8, verbose=0)
        sent = {
            name: []
            for name in ("all-gather of weights", "reduce-scatter of gradients")
        }
        gather, scatter = Workers.start_all_gather, Workers.start_reduce_scatter

        def start_all_gather(self, every, part):
            sent["all-gather of weights"].append(every.nbytes - part.nbytes)
            return gather(self, every, part)

        def start_reduce_scatter(self, part, parts):
            sent["reduce-scatter of gradients"].append(parts.nbytes - part.nbytes)
            return scatter(self, part, parts)

        with (
            mock.patch.object(Workers, "start_all_gather", start_all_gather),
            mock.patch.object(Workers, "start_reduce_scatter", start_reduce_scatter),
        ):
            model.fit(x, x, batch_size=8, verbose=0)
        return plan.cost.sent, {k: (len(v), sum(v)) for k, v in sent.items()}

    for planned, found in cluster(program):
        for kind, (count, nbytes) in found.items():
            assert planned[kind][0] == count, kind
            assert planned[kind][1] == pytest.approx(nbytes, rel=0.01), kind


def test_packs_of_full_weights_are_small_parts_of_a_model(cluster):
    """Two are in memory; those of a small model need not be divided."""

    def program(strategy):
        found = []
        for width in (64, 1024):

            def build(width=width):
                layers = [keras.layers.Dense(width) for _ in range(32)]
                model = keras.Sequential([keras.Input((width,)), *layers])
                model.compile("sgd", "mse")
                return model

            own = cut()
            plan = own.plan(build, ((8, width), (8, width)))
            found.append(plan.cost.sent["reduce-scatter of gradients"])
        return found

    for (few, _), (many, sent) in cluster(program):
        assert few == 1
        # 128 MiB of weights, half of them received by each of two processes.
        assert many == 16
        assert sent == pytest.approx(2**26, rel=0.01)


@pytest.mark.nightly(unless=["two-auto-2"])
@pytest.mark.parametrize(("layout_map", "width"), [("fsdp", 1), ("auto", 2)])
def test_the_peak_of_a_step_is_what_the_plan_says(cluster, layout_map, width):
    """Wide layers: shards, packs of weights and activations all count."""

    def program(strategy):
        from keras_strategies.engines.torch.compat import memory_tracker, tracked_bytes

        options = ks.CommunicationOptions(bytes_per_pack=2**18)
        own = ks.ModelParallelStrategy(
            layout_map,
            ["cpu:0"],
            width,
            min_shard_bytes=0,
            communication_options=options,
        )

        def build():
            model = keras.Sequential([keras.Input((256,))])
            for _ in range(6):
                model.add(keras.layers.Dense(256, "gelu"))
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
        return plan.peak, tracked_bytes(tracker, "peak") + state

    for planned, found in cluster(program):
        assert planned == pytest.approx(found, rel=0.15)


def test_what_fits_into_the_memory_of_a_device(cluster):
    """Wide layers in shards; many rows by accumulation; the numbers of one device."""

    def build():
        model = keras.Sequential([keras.Input((64,))])
        for _ in range(4):
            model.add(keras.layers.Dense(64, "gelu"))
        model.compile(keras.optimizers.SGD(0.1, 0.9), "mse")
        return model

    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(64, 64)).astype("float32") for _ in range(2))

    def weights(model, batch_size):
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
        return model.get_weights()

    keras.utils.set_random_seed(3)
    with ks.OneDeviceStrategy("cpu:0").scope():
        model = build()
    expected = weights(model, 64)

    def program(strategy):
        def fit_into(memory):
            return ks.fit_into(
                memory, build, ((64, 64), (64, 64)), ["cpu:0"], min_shard_bytes=0
            )

        ample = fit_into("1 GiB")
        least = min(each.peak for each in ample.tried if each.peak is not None)
        fit = fit_into(least - 1)
        keras.utils.set_random_seed(3)
        found = weights(fit.make_model(build), fit.batch_size)
        return ample.choice.layout, fit.choice, found

    for layout, choice, found in cluster(program):
        assert layout == "replicated"
        assert choice.rematerializes or choice.accumulation_steps > 1
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
