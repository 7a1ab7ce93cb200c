"""`jit_compile=True` on Torch: programs of layer calls, beside eager ones."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("other backends compile whole steps", allow_module_level=True)

import torch
from compiled_calls import models
from compiled_calls.models import (
    COMPILED,
    LABELS,
    MODELS,
    VECTORS,
    assert_equal,
    counted_programs,
    graphs_without_compiler,
    made,
    trained,
)

import keras_strategies as ks

layers = keras.layers


def replicas(count: int, **options: Any) -> ks.MirroredStrategy:
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(count)], **options)


def pairs() -> list[tuple[Any, bool]]:
    """One device without programs, and two replicas with them."""
    return [(ks.OneDeviceStrategy("cpu:0"), False), (replicas(2), True)]


def steps(model: keras.Model, labels: Any = LABELS[:7]) -> dict[str, Any]:
    """Trains on four batches of seven rows; returns all variables."""
    for _ in range(4):
        model.train_on_batch(VECTORS[:7], labels)
    return values(model)


def values(model: keras.Model) -> dict[str, Any]:
    return {str(i): np.array(v) for i, v in enumerate(model.variables)}


@pytest.mark.nightly(unless=["residual-2", "noisy-2", "rematerialized-2"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_programs_train_as_one_device(name, count) -> None:
    expected = trained(ks.OneDeviceStrategy("cpu:0"), name, is_compiled=False)
    with graphs_without_compiler() as graphs, counted_programs() as called:
        found = trained(replicas(count), name, is_compiled=True)
    assert len(called) == COMPILED * count
    assert {sum(every) for every in called} == {7}
    assert_equal(found, expected)
    counts = list(map(_collectives_in_order, graphs))
    if (name, count) == ("residual", 2):
        # Forward and backward, of 4 and 3 rows; evaluation exchanges nothing.
        assert counts[:4] == [2, 2, 2, 2]
        assert not any(counts[4:])


def _collectives_in_order(graph: torch.fx.Graph) -> int:
    """The number of collectives in a graph, each of which is after the one before."""
    kinds = ("all_gather.", "all_gather_gradient.", "all_reduce.")
    targets = tuple(f"keras_strategies.{kind}" for kind in kinds)
    found = [node for node in graph.nodes if str(node.target).startswith(targets)]
    for node, before in zip(found, [None, *found], strict=False):
        assert node.kwargs.get("after") is before
    return len(found)


def test_what_is_computed_again_is_not_kept() -> None:
    found = []
    for mode in (None, "full"):
        with replicas(2).scope(), graphs_without_compiler() as graphs:
            make = functools.partial(models.rematerialized, mode)
            model = made(make, jit_compile=True)
            for _ in range(3):
                model.train_on_batch(VECTORS[:8], LABELS[:8])
        forward, backward = graphs
        [results] = forward.output_node().args
        found.append((len(results), *map(_products, (forward, backward))))
    (kept, forward, backward), (kept_again, forward_again, backward_again) = found
    assert kept_again < kept
    assert forward_again == forward
    assert backward_again > backward


def _products(graph: torch.fx.Graph) -> int:
    """How many matrices a graph multiplies, which no compiler computes again."""
    kinds = torch.ops.aten.mm.default, torch.ops.aten.addmm.default
    return sum(node.target in kinds for node in graph.nodes)


@pytest.mark.nightly(unless=["product"])
@pytest.mark.parametrize("name", MODELS)
def test_what_the_compiler_makes_trains_as_eagerly(name) -> None:
    """For each upgrade of Torch: the private functions of its compiler still work."""
    eager = trained(replicas(2), name, is_compiled=False)
    with counted_programs() as called, warnings.catch_warnings():
        warnings.filterwarnings("error", ".*jit_compile")
        found = trained(replicas(2), name, is_compiled=True)
    assert len(called) == COMPILED * 2
    # Plain Keras, compiled, differs by as much.
    assert_equal(found, eager, 5e-5)


def test_a_head_without_a_loss_gets_no_gradient() -> None:
    """Weight decay would change what has a gradient of zeros."""
    results = []
    for strategy, is_compiled in pairs():
        with strategy.scope(), graphs_without_compiler():
            keras.utils.set_random_seed(1)
            vectors = keras.Input((6,))
            x = layers.Dense(4, "tanh")(vectors)
            heads = {"a": layers.Dense(3)(x), "b": layers.Dense(1, name="free")(x)}
            model = keras.Model(vectors, heads)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            optimizer = keras.optimizers.SGD(0.1, weight_decay=0.5)
            losses = {"a": loss, "b": None}
            model.compile(optimizer, losses, jit_compile=is_compiled)
            before = np.array(model.get_layer("free").kernel)
            with counted_programs() as called, warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Gradients do not exist")
                results.append(steps(model, {"a": LABELS[:7]}))
        assert len(called) == 4 * is_compiled
        np.testing.assert_array_equal(np.array(model.get_layer("free").kernel), before)
    assert_equal(results[1], results[0])


def test_a_backward_pass_may_be_repeated() -> None:
    class Twice(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y, _ = data
            self.zero_grad()
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward(retain_graph=True)
            loss.backward()
            self.optimizer.apply([v.value.grad for v in self.trainable_weights])
            return {"loss": loss}

    def make() -> keras.Model:
        vectors = keras.Input((6,))
        return Twice(vectors, layers.Dense(3)(layers.Dense(4, "tanh")(vectors)))

    results = []
    for strategy, is_compiled in pairs():
        with strategy.scope(), graphs_without_compiler():
            results.append(steps(made(make, jit_compile=is_compiled)))
    assert_equal(results[1], results[0])


@pytest.mark.nightly(unless=["True"])
@pytest.mark.parametrize("draws", [False, True])
def test_other_attributes_get_another_program(draws) -> None:
    def make() -> keras.Model:
        last = layers.Dropout(0.3) if draws else layers.Identity()
        hidden = [layers.Dense(4), layers.LeakyReLU(0.1), last]
        return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)])

    results = []
    for strategy, is_compiled in pairs():
        with strategy.scope(), graphs_without_compiler():
            model = made(make, jit_compile=is_compiled)
            with counted_programs() as called:
                for step in range(6):
                    model.layers[1].negative_slope = 0.1 if step < 4 else 0.7
                    model.layers[0].trainable = step != 5
                    model.train_on_batch(VECTORS[:7], LABELS[:7])
        assert len(called) == 8 * is_compiled
        results.append(values(model))
    assert_equal(results[1], results[0])


def test_at_most_four_numbers_of_rows_are_compiled() -> None:
    with replicas(2).scope(), graphs_without_compiler():
        model = made(models.product, jit_compile=True)
        with counted_programs() as called, _warnings() as warned:
            for rows in (4, 5, 6, 7, 8, 9):
                for _ in range(3):
                    model.train_on_batch(VECTORS[:rows], LABELS[:rows])
    assert sorted(set(map(sum, called))) == [4, 5, 6, 7]
    [text] = [text for text in warned if "jit_compile" in text]
    assert text == (
        "Layer 'product' (Functional) is called eagerly, though `jit_compile=True`: "
        "batches have more numbers of rows than are compiled (4)."
    )


@ks.row_wise
class Declared(layers.Layer):
    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x: Any) -> Any:
        return torch.tanh(x) * self.scale.value


def _declared() -> Any:
    return keras.Sequential([keras.Input((6,)), Declared(), layers.Dense(3)])


def _in_half() -> Any:
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, dtype="mixed_float16")])


REFUSED = {
    "float16": (_in_half, "it reads variables in float16"),
    "keras_numbers": (
        models.noisy,
        "it draws random numbers as Keras without a strategy",
    ),
    "declared": (
        _declared,
        "what code of a layer reads that is declared as row-wise is not known",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_compiled_is_named_and_trains(name) -> None:
    make, reason = REFUSED[name]
    options = {"random_numbers": "keras"} if name == "keras_numbers" else {}
    results = []
    for is_compiled in (False, True):
        with replicas(2, **options).scope(), graphs_without_compiler():
            model = made(make, jit_compile=is_compiled)
            with counted_programs() as called, _warnings() as warned:
                results.append(steps(model))
        texts = [text for text in warned if "jit_compile" in text]
        assert len(texts) == is_compiled
        assert all(text.endswith(f"`jit_compile=True`: {reason}.") for text in texts)
        assert not called
    assert_equal(results[1], results[0], 1e-7)


@contextlib.contextmanager
def _warnings() -> Any:
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught]


def test_without_a_compiler_of_cpp_training_goes_on(monkeypatch, tmp_path) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    results = []
    for is_compiled in (False, True):
        with replicas(2).scope():
            model = made(models.exchanging, jit_compile=is_compiled)
        with _warnings() as warned, counted_programs() as called:
            results.append(steps(model))
    assert not called
    [text] = {text for text in warned if "jit_compile" in text}
    assert "no-such-compiler" in text
    assert "\n" not in text
    assert_equal(results[1], results[0], 1e-7)


@pytest.mark.nightly
def test_a_second_process_finds_the_programs(tmp_path) -> None:
    script = (
        "from torch._dynamo.utils import counters\n"
        "from compiled_calls.test_compiled_calls import replicas, trained\n"
        "trained(replicas(2), 'noisy', is_compiled=True)\n"
        "print('MISSES', counters['inductor']['fxgraph_cache_miss'])\n"
    )
    tests = str(Path(__file__).parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([tests, *sys.path]),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
    }
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            check=True,
        ).stdout.split("MISSES")[1]
        for _ in range(2)
    ]
    assert int(found[0]) > 0
    assert int(found[1]) == 0
