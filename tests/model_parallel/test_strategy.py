"""`ModelParallelStrategy`: the numbers of one device, parts on every device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from custom_loops.test_training import alone, assert_alike, loop
from harness.strategies import MODEL_PARALLEL
from harness.training import assert_same_training
from keras import layers, optimizers
from keras.distribution import DeviceMesh, LayoutMap
from model_parallel.model_parallel_cases import CASES

import keras_strategies as ks

JAX = keras.backend.backend() == "jax"
TENSORFLOW = keras.backend.backend() == "tensorflow"
if TENSORFLOW:
    from keras_strategies.engines.tensorflow.replicas import mirrored_variables

#: Torch shards variables over processes: see `multi_worker/test_torch_model_parallel`.
pytestmark = pytest.mark.skipif(
    keras.backend.backend() == "torch", reason="each device needs a process"
)

DEVICES = [f"cpu:{i}" for i in range(4)]


@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.nightly(unless=["dense_bn_3-model_4x1"])
@pytest.mark.parametrize("name", MODEL_PARALLEL)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_same_as_one_device(case, name) -> None:
    assert_same_training(case, MODEL_PARALLEL[name].make())


def network():
    up = layers.Dense(16, "relu", name="up")
    return keras.Sequential([keras.Input((8,)), up, layers.Dense(8, name="down")])


def made(strategy, optimizer="adam"):
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = network()
        model.compile(optimizer, "mse")
    return model


def rows(count=22):
    random = np.random.default_rng(0)
    return (random.normal(size=(count, 8)).astype("float32") for _ in range(2))


def shards(variable):
    """For each device what it keeps of a variable."""
    if JAX:
        found = variable.value.addressable_shards
        return {f"cpu:{each.device.id}": np.asarray(each.data) for each in found}
    found = variable.value.by_device
    assert all(value.device.endswith(device) for device, value in found.items())
    return {f"cpu:{device[-1]}": value.numpy() for device, value in found.items()}


def parts(variable):
    """For each device the shape of what it keeps of a variable."""
    if TENSORFLOW and isinstance(variable.value, mirrored_variables.MirroredVariable):
        return dict.fromkeys(DEVICES, tuple(variable.shape))
    return {device: value.shape for device, value in shards(variable).items()}


def slots_of_up(model):
    slots = [v for v in model.optimizer.variables if "up_kernel" in v.path]
    assert len(slots) == 2
    return slots


@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.parametrize("when", ["made", "trained", "loaded"])
def test_variables_and_slots_are_in_parts(when, tmp_path) -> None:
    strategy = ks.ModelParallelStrategy("auto", DEVICES, 2, min_shard_bytes=0)
    model = made(strategy)
    x, y = rows()
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    if when != "made":
        model.fit(x, y, batch_size=8, verbose=0)
    if when == "loaded":
        model.save(tmp_path / "model.keras")
        with strategy.scope():
            model = keras.models.load_model(tmp_path / "model.keras")
    up, _, down, _ = model.weights
    for variable in (up, down, *slots_of_up(model)):
        assert parts(variable) == dict.fromkeys(DEVICES, (8, 8))
    ups = [shards(up)[device] for device in DEVICES]
    np.testing.assert_array_equal(np.concatenate(ups[:2], 1), up.numpy())
    assert "in parts on cpu:0, cpu:1, cpu:2, cpu:3" in repr(up)


@pytest.mark.one_backend("jax", "tensorflow")
def test_a_layout_map_of_keras_brings_its_mesh() -> None:
    mesh = DeviceMesh((2, 2), ("data", "tp"), np.array(DEVICES[::-1]))
    layout_map = LayoutMap(mesh)
    layout_map[".*up/kernel"] = (None, "tp")
    layout_map[".*up/output"] = ("data", "tp")
    strategy = ks.ModelParallelStrategy(layout_map)
    assert strategy.mesh.sizes == {"data": 2, "tp": 2}
    assert strategy.distribution.device_mesh.axis_names == ["data", "tp"]
    assert isinstance(strategy.distribution, keras.distribution.ModelParallel)
    assert [str(r[0]) for r in strategy.mesh.rows] == ["cpu:3", "cpu:1"]
    x, y = rows(23)
    results = []
    for chosen in (strategy, ks.get_strategy()):
        model = made(chosen, optimizer=optimizers.SGD(0.1))
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False)
        results.append(model.get_weights())
        if chosen is strategy:
            assert parts(model.weights[0])["cpu:0"] == (8, 8)
            assert parts(model.weights[2])["cpu:0"] == (16, 8)
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["model_1x4"])
@pytest.mark.parametrize("name", MODEL_PARALLEL)
def test_a_custom_loop_equals_one_device(name) -> None:
    """Replicas are the places on the data axis; variables are whole in them."""
    assert_alike(loop(MODEL_PARALLEL[name].make(), 35), alone(35))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"model_parallel": 3}, "does not divide the number of devices, 4"),
        ({"layout_map": "megatron"}, "`layout_map` must be 'auto', 'fsdp'"),
        ({"layout_map": {"kernel": "model"}}, "The layout of 'kernel' must be a tuple"),
        ({"devices": ["cpu:0", "cpu:0"]}, "cpu:0"),
    ],
)
def test_bad_arguments(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        ks.ModelParallelStrategy(**{"devices": DEVICES, **arguments})


def test_what_does_not_fit() -> None:
    layout_map = LayoutMap(DeviceMesh((2, 2), ("batch", "model"), np.array(DEVICES)))
    with pytest.raises(ValueError, match=r"for 4 devices, but `devices` names 2"):
        ks.ModelParallelStrategy(layout_map, DEVICES[:2])
    with pytest.raises(ValueError, match=r"`model_parallel` is 4, but .* \(2, 2\)"):
        ks.ModelParallelStrategy(layout_map, model_parallel=4)
    strategy = ks.ModelParallelStrategy({".*kernel": (None, "model")}, DEVICES, 4)
    message = r"'up/kernel' of shape \(8, 6\).*axis 1, 6, does not divide"
    with strategy.scope(), pytest.raises(ValueError, match=message):
        layers.Dense(6, name="up").build((None, 8))
    with ks.MirroredStrategy(DEVICES[:2]).scope():
        model = network()
    with strategy.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        model.predict(next(rows()))


@pytest.mark.skipif(not TENSORFLOW, reason="JAX makes them where their layout says")
def test_slots_made_outside_of_the_scope_are_sharded_in_fit() -> None:
    strategy = MODEL_PARALLEL["model_2x2"].make()
    model = made(strategy)
    model.optimizer.build(model.trainable_variables)
    x, y = rows()
    model.fit(x, y, batch_size=8, verbose=0)
    for slot in slots_of_up(model):
        assert parts(slot) == dict.fromkeys(DEVICES, (8, 8))


@pytest.mark.one_backend("jax", "tensorflow")
@pytest.mark.parametrize("use", ["fit", "predict", "describe", "plan"])
def test_a_pattern_that_matches_no_variable_is_an_error(use) -> None:
    strategy = ks.ModelParallelStrategy({".*dense_up/kernal": ("model",)}, DEVICES, 2)

    def build() -> keras.Model:
        first = [keras.Input((4,))] if use == "describe" else []
        model = keras.Sequential([*first, layers.Dense(2, name="dense_up")])
        model.compile("sgd", "mse")
        return model

    with strategy.scope():
        model = build()
    uses = {
        "fit": lambda: model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0),
        "predict": lambda: model.predict(np.ones((4, 4)), verbose=0),
        "describe": lambda: strategy.describe(model),
        "plan": lambda: strategy.plan(build, ((4, 4), (4, 2))),
    }
    with pytest.raises(ks.errors.LayoutError, match=r"kernal.*'.*dense_up/kernel'"):
        uses[use]()
