"""Current devices, streams and default devices of replicas on accelerators."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from harness import devices, models, python_accelerator
from harness.case import Case, as_arrays, train
from harness.data import classes
from harness.training import assert_same, state_of

if keras.backend.backend() != "torch" or devices.KIND == "cpu":
    pytest.skip("run by `test_accelerators.py`", allow_module_level=True)

import torch

import keras_strategies as ks
from keras_strategies.devices import Device
from keras_strategies.engines.torch.devices import torch_device

DEVICES = [torch_device(Device("gpu", i)) for i in range(2)]


def streams() -> tuple[int, ...]:
    """This thread's current device, and the current stream of each device."""
    found = [torch.accelerator.current_stream(device).stream_id for device in DEVICES]
    return (torch.accelerator.current_device_index(), *found)


#: What the calls of layers have noted, which attributes would not keep in a comparison.
FORWARD: list[Any] = []
BACKWARD: list[Any] = []


class _Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, layer: Any) -> Any:
        FORWARD.append((streams(), layer.note()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        BACKWARD.append(streams())
        return gradient, None


@ks.row_wise
class Noting(keras.layers.Layer):
    def __init__(self, note: Any = lambda: None) -> None:
        super().__init__()
        self.note = note
        FORWARD.clear()
        BACKWARD.clear()

    def call(self, x: Any) -> Any:
        return _Noted.apply(x, self)


def trained(layer: Noting) -> None:
    """A step of `fit`, with its notes."""
    strategy = ks.MirroredStrategy(["gpu:0", "gpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), layer])
        model.compile("sgd", "sparse_categorical_crossentropy")
    rows = classes(8)
    model.fit(rows.x, rows.y, batch_size=8, shuffle=False, verbose=0)


def test_the_current_device_is_that_of_the_replica() -> None:
    trained(Noting())
    assert {found[0] for found, _ in FORWARD[-2:]} == {0, 1}
    assert {found[0] for found in BACKWARD} == {0, 1}


def test_the_callers_streams_are_those_of_replicas_forward_and_backward() -> None:
    with torch.Stream(DEVICES[1]) as one, torch.Stream(DEVICES[0]) as zero:
        trained(Noting())
    current = (zero.stream_id, one.stream_id)
    assert 0 not in current
    assert {found[1:] for found, _ in FORWARD[-2:]} == {current}
    assert {found[1:] for found in BACKWARD} == {current}
    assert streams()[1:] == (0, 0)


def test_a_default_device_is_that_of_the_replica() -> None:
    with DEVICES[0]:
        trained(Noting(lambda: torch.empty(1).device))
    assert {device for _, device in FORWARD[-2:]} == set(DEVICES)


@pytest.mark.parametrize("names", [("gpu:1", "cpu:0"), ("cpu:0", "gpu:1")])
def test_an_accelerator_and_a_cpu_equal_one_device(names) -> None:
    case = Case("dense_bn", model=models.dense_bn, rows=23)
    expected = train(case, ks.OneDeviceStrategy("cpu:0"))
    assert_same(expected, train(case, ks.MirroredStrategy(names)), 1e-5, str(names))


def noisy() -> keras.Model:
    noise = [keras.layers.Dropout(0.4), keras.layers.GaussianNoise(0.5, seed=3)]
    last = keras.layers.Dense(3, "softmax")
    return keras.Sequential([keras.Input((6,)), *noise, last])


def weights_of_noisy(strategy: Any) -> Any:
    return train(Case("noisy", model=noisy, rows=13), strategy)


def test_partitioned_numbers_of_an_accelerator(monkeypatch: Any) -> None:
    from keras_strategies.engines.torch.random_numbers import block_draws

    monkeypatch.setattr(block_draws, "_ACCELERATOR_BLOCK", 12)
    expected = weights_of_noisy(ks.OneDeviceStrategy("gpu:0"))
    found = weights_of_noisy(ks.MirroredStrategy(["gpu:0", "gpu:1"]))
    assert_same(expected, found, 1e-5, "two accelerators")


@pytest.mark.parametrize("devices", [("gpu:0", "cpu:0"), ("cpu:0", "gpu:0")])
def test_devices_of_different_kinds_draw_on_one(devices: tuple[str, ...]) -> None:
    """Their generators are different: calls are not split, and `run` is refused."""
    expected = weights_of_noisy(ks.OneDeviceStrategy(devices[0]))
    mixed = ks.MirroredStrategy(devices)
    with pytest.warns(UserWarning, match="devices of different kinds"):
        found = weights_of_noisy(mixed)
    assert_same(expected, found, 1e-5, str(devices))
    with mixed.scope():
        layer = keras.layers.Dropout(0.5)
    rows = ks.PerReplica([torch.ones(2, 3), torch.ones(2, 3)])
    with pytest.raises(ks.errors.ContextError, match="devices of one kind"):
        mixed.run(lambda x: layer(x, training=True), args=(rows,))
    means = mixed.run(lambda x: x.mean(), args=(rows,))
    assert [float(each) for each in mixed.experimental_local_results(means)] == [1, 1]


#: Variables elsewhere than on Keras's default device, `gpu:0`.
ELSEWHERE = {
    "one device": lambda: ks.OneDeviceStrategy("gpu:1"),
    "central": lambda: ks.CentralStorageStrategy(["gpu:0", "gpu:1"], "cpu:0"),
}


def made(name: str, is_outside: bool) -> tuple[Any, Any, Any, Any]:
    """A strategy and a model, with an optimizer and a metric from outside or not."""

    def parts() -> tuple[Any, Any]:
        return keras.optimizers.Adam(0.1), keras.metrics.MeanSquaredError()

    strategy = ELSEWHERE[name]()
    given = parts() if is_outside else None
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        optimizer, metric = given or parts()
    return strategy, model, optimizer, metric


def compiled_and_fit(name: str, is_outside: bool) -> dict[str, Any]:
    strategy, model, optimizer, metric = made(name, is_outside)
    model.compile(optimizer, "mse", metrics=[metric])
    rows = classes(14)
    history = model.fit(rows.x, rows.y, batch_size=8, shuffle=False, verbose=0)
    homes = {str(v.value.device) for v in (*optimizer.variables, *metric.variables)}
    assert homes == {str(torch_device(strategy.placement.variables))}
    return as_arrays({"history": history.history}) | state_of(model)


def looped(name: str, is_outside: bool) -> dict[str, Any]:
    strategy, model, optimizer, metric = made(name, is_outside)

    def step(batch: Any) -> None:
        x, y = batch
        predicted = model(x)[:, 0]
        loss = ks.compute_average_loss(keras.ops.square(predicted - y))
        weights = model.trainable_variables
        values = [weight.value for weight in weights]
        optimizer.apply(torch.autograd.grad(loss, values), weights)
        metric.update_state(y, predicted)

    rows = classes(8)
    for batch in strategy.experimental_distribute_dataset([(rows.x, rows.y)] * 2):
        strategy.run(step, args=(batch,))
    values = [*model.get_weights(), keras.ops.convert_to_numpy(metric.result())]
    return dict(enumerate(values))


@pytest.mark.parametrize("name", ELSEWHERE)
@pytest.mark.parametrize("train", [compiled_and_fit, looped])
def test_an_optimizer_and_a_metric_from_outside_of_the_scope(train, name: str) -> None:
    assert_same(train(name, False), train(name, True), 1e-6, name)


class _Waits(keras.callbacks.Callback):
    """What the host has waited for in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[str]] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        python_accelerator.waits.clear()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps.append(list(python_accelerator.waits))


def _normalized(strategy: Any) -> Any:
    """A model with statistics of batches and metrics."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        x = keras.Input((6,))
        h = keras.layers.BatchNormalization()(keras.layers.Dense(8, "relu")(x))
        h = keras.layers.Dense(3, "softmax")(keras.layers.Dropout(0.3)(h))
        model = keras.Model(x, h)
        model.compile(
            keras.optimizers.Adam(0.01),
            "sparse_categorical_crossentropy",
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
        )
    return model


def _waits_of_fit(strategy: Any) -> list[list[str]]:
    rows, waits = classes(48), _Waits()
    given = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": [waits]}
    _normalized(strategy).fit(rows.x, rows.y, **given)
    return waits.steps


def _waits_of_loop(strategy: Any) -> list[list[str]]:
    rows, waits, model = classes(48), _Waits(), _normalized(strategy)
    with strategy.scope():
        metric = keras.metrics.SparseCategoricalAccuracy()
    weights = model.trainable_variables

    def replica_step(x: Any, y: Any) -> None:
        def loss() -> Any:
            found = model(x, training=True)
            metric.update_state(y, found)
            losses = keras.ops.sparse_categorical_crossentropy(y, found)
            return ks.compute_average_loss(losses)

        _, gradients = ks.value_and_grad(loss, weights)()
        model.optimizer.apply(gradients, weights)

    model.optimizer.build(weights)
    data = strategy.experimental_distribute_dataset((rows.x, rows.y), batch_size=8)
    for i, batch in enumerate(data):
        waits.on_train_batch_begin(i)
        strategy.run(replica_step, args=batch)
        waits.on_train_batch_end(i)
    assert float(metric.count) == 48
    return waits.steps


@pytest.mark.skipif(
    DEVICES[0].type != python_accelerator.KIND, reason="GPUs do not say"
)
@pytest.mark.parametrize(("train", "logs"), [(_waits_of_fit, 3), (_waits_of_loop, 0)])
def test_the_host_waits_for_no_device_in_a_step(train: Any, logs: int) -> None:
    # Keras reads the loss and two metrics for callbacks, after the step.
    expected = [["copy to the host"] * logs] * 4
    for strategy in (
        ks.OneDeviceStrategy("gpu:0"),
        ks.MirroredStrategy(["gpu:0", "gpu:1"], processes=False),
    ):
        found = train(strategy)
        # Models are built and rows are proved in the first steps.
        assert len(found) == 6 and found[2:] == expected
