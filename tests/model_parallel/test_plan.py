"""`strategy.plan` and `describe`: bytes and layouts, before and after there are any."""

from __future__ import annotations

import resource

import keras
import numpy as np
import pytest
from harness.strategies import STRATEGIES
from keras import layers

import keras_strategies as ks

BACKEND = keras.backend.backend()
JAX, TORCH = BACKEND == "jax", BACKEND == "torch"
only_jax = pytest.mark.skipif(not JAX, reason="only JAX reads the compiled step")
not_torch = pytest.mark.skipif(TORCH, reason="each device needs a process")
DEVICES = [f"cpu:{i}" for i in range(4)]


def perceptron(units=64, inputs=32, built=True):
    def build():
        first = [keras.Input((inputs,))] if built else []
        hidden = layers.Dense(units, "relu", name="up")
        last = layers.Dense(inputs, name="down")
        model = keras.Sequential([*first, hidden, layers.Dropout(0.5), last])
        model.compile("adam", "mse", metrics=["mae"])
        return model

    return build


def model_parallel(layout_map="auto", size=2):
    return ks.ModelParallelStrategy(layout_map, DEVICES, size, min_shard_bytes=0)


def resident() -> int:
    """Bytes of this process at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.one_backend("jax", "tensorflow")
@not_torch
def test_a_model_far_larger_than_memory_is_planned() -> None:
    before = resident()
    strategy = ks.ModelParallelStrategy("auto", DEVICES, 4)
    plan = strategy.plan(perceptron(2**20, 2**16), ((64, 2**16), (64, 2**16)))
    kernel = 2**36 * 4
    weights = plan.bytes_per_device("weight")
    assert weights["cpu:0"] == pytest.approx(2 * kernel / 4, rel=1e-3)
    slots = plan.bytes_per_device("slot")
    assert slots["cpu:3"] == pytest.approx(4 * kernel / 4, rel=1e-3)
    if JAX:
        assert plan.peak > 6 * kernel / 4
    assert resident() - before < 2**31
    # Half a tebibyte is not waiting to be made either.
    with ks.MirroredStrategy(DEVICES[:2]).scope():
        layers.Dense(2).build((None, 2))
    assert resident() - before < 2**31


BY_DAY = ["built-one_device", "built-central", "unbuilt-mirrored_2", "unbuilt-fsdp_2x2"]


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=BY_DAY)
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("built", [True, False], ids=["built", "unbuilt"])
def test_a_plan_says_what_then_is(name, built) -> None:
    """Bytes by device of a plan are those of the model that is made after it."""
    strategy = STRATEGIES[name].make()
    plan = strategy.plan(perceptron(built=built), ((8, 32), (8, 32)))
    with strategy.scope():
        model = perceptron(built=built)()
    # Mirrored variables of Torch are copied when replicas first read them.
    x = np.zeros((8, 32), "float32")
    model.fit(x, x, batch_size=8, verbose=0)
    if TORCH and strategy.num_replicas_in_sync > 1:
        copies = [c for v in model.variables for c in strategy.drivers.fit.copies(v)]
        own = sum(copy.nbytes for copy in copies if copy.device == "cpu:0")
        assert plan.bytes_per_device("weight")["cpu:0"] == own
        return
    totals = strategy.describe(model).totals
    kinds = [plan.bytes_per_device(kind) for kind in ("weight", "slot", "metric")]
    for device, nbytes in totals.items():
        assert sum(kind.get(device, 0) for kind in kinds) == nbytes


@pytest.mark.one_backend
def test_a_quantized_model_with_adapters_is_planned(mirrored) -> None:
    """Keras on Torch registers the values of variables that it makes."""

    def build() -> keras.Model:
        model = perceptron()()
        model.quantize("int8", filters=lambda each: isinstance(each, layers.Dense))
        for name in ("up", "down"):
            model.get_layer(name).enable_lora(2)
        model.compile("adam", "mse")
        return model

    plan = mirrored.plan(build, ((8, 32), (8, 32)))
    with mirrored.scope():
        model = build()
    sizes = (np.prod(v.shape) * np.dtype(v.dtype).itemsize for v in model.variables)
    assert plan.bytes_per_device("weight")["cpu:0"] == sum(map(int, sizes))


@only_jax
def test_fsdp_sends_at_most_two_gathers_and_a_reduction() -> None:
    for units, inputs, rows in ((1024, 512, 8), (64, 32, 4096)):
        shapes = ((rows, inputs), (rows, inputs))
        plan = model_parallel("fsdp", 1).plan(perceptron(units, inputs), shapes)
        (shard,) = set(plan.bytes_per_device("weight").values())
        # Three of four parts: a gather in each pass, and an all-reduce of gradients,
        # which is two, since XLA has no reduce-scatter on CPUs. The rest are metrics.
        assert plan.sent <= 1.05 * 4 * 3 * shard + 1000


@not_torch
def test_a_plan_and_a_description_are_readable() -> None:
    strategy = model_parallel()
    plan = strategy.plan(perceptron(), ((8, 32), (8, 32)))
    text = str(plan)
    assert "'auto', 2 batch x 2 model" in text.splitlines()[0]
    assert "4,192 parameters" in text.splitlines()[0]
    (line,) = (line for line in text.splitlines() if "up/kernel" in line)
    assert line.split()[1:] == ["32x64", "float32", "(-,", "model)", "4.0", "KiB"]
    how = "read from the compiled step" if JAX else "TensorFlow knows no peak before"
    assert how in text
    assert ">(-, model)</td>" in plan._repr_html_()
    with strategy.scope():
        model = perceptron()()
    description = strategy.describe(model)
    assert "(-, model)" in str(description)
    assert "(-, model)" in description._repr_html_()


def test_bad_arguments_of_plan(mirrored) -> None:
    with pytest.raises(ValueError, match="must return a compiled `keras"):
        mirrored.plan(lambda: keras.Sequential([layers.Dense(1)]), ((8, 2), (8, 1)))
    with pytest.raises(ValueError, match="`batch_shapes` must be a shape such as"):
        mirrored.plan(perceptron(), "8x32")


@pytest.mark.skipif(not TORCH, reason="one process uses all devices")
def test_torch_says_what_works_there() -> None:
    with pytest.raises(ks.errors.BackendError) as caught:
        ks.ModelParallelStrategy(devices=DEVICES)
    text = str(caught.value)
    assert text.startswith("ks.ModelParallelStrategy")
    for what in (
        *("with KERAS_BACKEND='torch'", "KERAS_BACKEND=jax", "torchrun"),
        # A test is no script, which would start the other processes.
        *("keras-strategies launch --workers 4", "ks.launch(train, workers=4)"),
    ):
        assert what in text


@pytest.mark.skipif(BACKEND != "tensorflow", reason="others have a peak")
def test_the_largest_activation_is_that_of_the_rows_of_a_device() -> None:
    for strategy, share in (
        (ks.OneDeviceStrategy("cpu:0"), 1),
        (ks.MirroredStrategy(DEVICES[:2]), 2),
        (model_parallel("fsdp", 1), 4),
    ):
        plan = strategy.plan(perceptron(), ((256, 32), (256, 32)))
        assert plan.peak is None
        assert plan.cost.activation == 256 * 64 * 4 / share
        assert "largest activation per device" in str(plan)
        assert "TensorFlow knows no peak before a step has run" in str(plan)
