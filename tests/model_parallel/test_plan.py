"""`strategy.plan` and `describe`: bytes and layouts, before and after there are any."""

from __future__ import annotations

import resource

import keras
import numpy as np
import pytest
from harness.strategies import STRATEGIES
from keras import layers

import keras_strategies as ks

TENSORFLOW = keras.backend.backend() == "tensorflow"
JAX = keras.backend.backend() == "jax"
only_jax = pytest.mark.skipif(not JAX, reason="only JAX reads the compiled step")
not_torch = pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="each device needs a process"
)
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


# A row for each way to place variables; a model that is built by the plan, once.
PLANNED = [
    ("one_device", True),
    ("mirrored_2", True),
    ("central", True),
    ("mirrored_2", False),
    ("fsdp_2x2", False),
]


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize(
    "name, built",
    [
        pytest.param(
            name,
            built,
            marks=[] if (name, built) in PLANNED else pytest.mark.nightly,
        )
        for name in STRATEGIES
        for built in (True, False)
    ],
)
def test_a_plan_says_what_then_is(name, built) -> None:
    """Bytes by device of a plan are those of the model that is made after it."""
    strategy = STRATEGIES[name].make()
    shapes = ((8, 32), (8, 32))
    plan = strategy.plan(perceptron(built=built), shapes)
    with strategy.scope():
        model = perceptron(built=built)()
    # Mirrored variables of Torch are copied when replicas first read them.
    x = np.zeros((8, 32), "float32")
    model.fit(x, x, batch_size=8, verbose=0)
    if keras.backend.backend() == "torch" and strategy.num_replicas_in_sync > 1:
        totals = dict.fromkeys(DEVICES, 0)
        for variable in model.variables:
            for copy in strategy.drivers.fit.copies(variable):
                totals[copy.device] += copy.nbytes
        weights = plan.bytes_per_device("weight")
        assert weights["cpu:0"] == totals["cpu:0"]
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
    weights = plan.bytes_per_device("weight")
    expected = sum(
        int(np.prod(v.shape)) * np.dtype(v.dtype).itemsize for v in model.variables
    )
    assert weights["cpu:0"] == expected


def test_gradients_are_as_large_as_what_is_trained() -> None:
    strategy = ks.OneDeviceStrategy("cpu:0")
    plan = strategy.plan(perceptron(), ((8, 32), (8, 32)))
    trained = (32 * 64 + 64 + 64 * 32 + 32) * 4
    assert plan.bytes_per_device("gradient") == {"cpu:0": trained}
    # Two slots for each, the iteration and the learning rate.
    iteration = np.dtype("int64" if TENSORFLOW else "int32").itemsize
    assert plan.bytes_per_device("slot") == {"cpu:0": 2 * trained + iteration + 4}
    assert plan.sent == 0


@only_jax
def test_what_is_sent_is_read_from_the_program() -> None:
    """Data parallelism sends gradients, once, in a ring: 2(n-1)/n of their bytes."""
    strategy = ks.MirroredStrategy(DEVICES)
    plan = strategy.plan(perceptron(), ((8, 32), (8, 32)))
    (gradients,) = set(plan.bytes_per_device("gradient").values())
    assert set(plan.cost.sent) == {"all-reduce"}
    # And a few scalars of the loss and the metrics.
    assert plan.sent == pytest.approx(2 * 3 / 4 * gradients, abs=100)


@only_jax
def test_fsdp_gathers_kernels_where_rows_are_more() -> None:
    plan = model_parallel("fsdp", 1).plan(perceptron(), ((4096, 32), (4096, 32)))
    (parameters,) = set(plan.bytes_per_device("weight").values())
    count, nbytes = plan.cost.sent["all-gather"]
    assert count >= 2
    # Each device lacks three parts of four.
    assert nbytes == pytest.approx(3 * parameters, rel=0.05)


@only_jax
def test_fsdp_moves_rows_where_kernels_are_larger() -> None:
    shapes = ((8, 512), (8, 512))
    plan = model_parallel("fsdp", 1).plan(perceptron(1024, 512), shapes)
    (parameters,) = set(plan.bytes_per_device("weight").values())
    # Three times that were gathered, and twice as much of gradients reduced.
    assert plan.sent < parameters


def convolutional():
    model = keras.Sequential([keras.Input((8, 8, 3))])
    for _ in range(3):
        model.add(layers.Conv2D(32, 3, padding="same", activation="relu"))
    model.add(layers.GlobalAveragePooling2D())
    model.add(layers.Dense(4))
    model.compile("adam", "mse")
    return model


def language():
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Embedding(1000, 128)(tokens)
    x = x + layers.MultiHeadAttention(4, 32)(x, x)
    x = x + layers.Dense(128)(layers.Dense(512, "gelu")(x))
    model = keras.Model(tokens, layers.Dense(1000)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@only_jax
@pytest.mark.parametrize(
    ("build", "shapes"),
    [
        (perceptron(1024, 512), ((8, 512), (8, 512))),
        (perceptron(64, 32), ((4096, 32), (4096, 32))),
        (convolutional, ((64, 8, 8, 3), (64, 4))),
        (language, ((64, 64), (64, 64))),
    ],
    ids=["few rows", "many rows", "convolutional", "language"],
)
def test_fsdp_sends_at_most_two_gathers_and_a_reduction(build, shapes) -> None:
    plan = model_parallel("fsdp", 1).plan(build, shapes)
    (shard,) = set(plan.bytes_per_device("weight").values())
    # Three of four parts: a gather in each pass, and an all-reduce of gradients, which
    # is two, since XLA has no reduce-scatter on CPUs. The rest are metrics.
    assert plan.sent <= 1.05 * 4 * 3 * shard + 1000


@only_jax
def test_peak_memory_falls_with_the_model_axis() -> None:
    peaks = [
        model_parallel("auto", size)
        .plan(perceptron(1024, 512), ((8, 512), (8, 512)))
        .peak
        for size in (1, 2, 4)
    ]
    assert peaks[1] < 0.6 * peaks[0]
    assert peaks[2] < 0.6 * peaks[1]


@only_jax
def test_collectives_in_loops_count_as_often_as_they_run() -> None:
    from keras_strategies.engines.jax.fit.hlo_collectives import sent_bytes

    program = """
HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%body (t: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %g = bf16[8]{0} all-gather(%x), replica_groups=[2,2]<=[4], dimensions={0}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[], bf16[8]) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %r = (f32[4]{0}, f32[2,2]{1,0}) all-reduce(%p, %q), replica_groups={{0,1,2,3}}, to_apply=%sum
  %s = f32[2]{0} reduce-scatter(%p), replica_groups=mesh['a'=2,'b'=2] {'a'}, to_apply=%sum
  ROOT %p2 = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1}}
}
"""  # noqa: E501
    assert sent_bytes(program) == {
        "all-gather": (5, 5 * 8),
        "all-reduce": (1, 48),
        "reduce-scatter": (1, 8),
        "collective-permute": (1, 16),
    }


@not_torch
def test_a_plan_and_a_description_are_readable() -> None:
    strategy = model_parallel()
    plan = strategy.plan(perceptron(), ((8, 32), (8, 32)))
    text = str(plan)
    assert "'auto', 2 batch x 2 model" in text.splitlines()[0]
    assert "4,192 parameters" in text.splitlines()[0]
    (line,) = (line for line in text.splitlines() if "up/kernel" in line)
    assert line.split() == [
        "sequential/up/kernel" if line.startswith("sequential/") else line.split()[0],
        *["32x64", "float32", "(-,", "model)", "4.0", "KiB"],
    ]
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


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="one process uses all devices"
)
def test_torch_says_what_works_there() -> None:
    with pytest.raises(ks.errors.BackendError) as caught:
        ks.ModelParallelStrategy(devices=DEVICES)
    text = str(caught.value)
    assert text.startswith("ks.ModelParallelStrategy")
    assert "with KERAS_BACKEND='torch'" in text
    assert "KERAS_BACKEND=jax" in text
    # A test is no script, which would start the other processes.
    for what in (
        "keras-strategies launch --workers 4",
        "ks.launch(train, workers=4)",
        "torchrun",
    ):
        assert what in text


@pytest.mark.skipif(not TENSORFLOW, reason="others have a peak")
def test_the_largest_activation_is_that_of_the_rows_of_a_device() -> None:
    shapes = ((64, 8, 8, 3), (64, 4))
    largest = 64 * 8 * 8 * 32 * 4
    for strategy, share in (
        (ks.OneDeviceStrategy("cpu:0"), 1),
        (ks.MirroredStrategy(DEVICES[:2]), 2),
        (model_parallel("fsdp", 1), 4),
    ):
        plan = strategy.plan(convolutional, shapes)
        assert plan.peak is None
        assert plan.cost.activation == largest / share
        assert "largest activation per device" in str(plan)
        assert "TensorFlow knows no peak before a step has run" in str(plan)


@pytest.mark.skipif(not TENSORFLOW, reason="estimated on TensorFlow")
def test_shards_are_gathered_and_their_gradients_scattered() -> None:
    plan = model_parallel("fsdp", 1).plan(perceptron(), ((8, 32), (8, 32)))
    (weights,) = set(plan.bytes_per_device("weight").values())
    shards = weights - 16  # A seed.
    # Each device sends its shards to three others, and three parts of its gradients.
    assert plan.cost.sent == {
        "all-gather of weights": (4, 3 * shards),
        "reduce-scatter of gradients": (4, 3 * shards),
    }


@only_jax
def test_the_gradient_of_a_replicated_bias_is_gathered_once() -> None:
    """And not the bias and both slots of Adam, which are updated with it."""

    def build():
        hidden = [layers.Dense(128, "relu", name=f"hidden{i}") for i in range(4)]
        model = keras.Sequential([keras.Input((12,)), *hidden, layers.Dense(8)])
        model.compile("adam", "mse")
        return model

    strategy = ks.ModelParallelStrategy("auto", DEVICES[:2], 2, min_shard_bytes=2**12)
    plan = strategy.plan(build, ((32, 12), (32, 8)))
    # Activations are gathered twice.
    assert plan.cost.sent["all-gather"][0] == 2 + 4
