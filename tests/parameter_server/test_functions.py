"""Functions on workers: arguments, closures, results and errors of any kind."""

from __future__ import annotations

import collections
import dataclasses
import sys
import threading

import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from parameter_server import clusters

pytestmark = [pytest.mark.one_backend, pytest.mark.multiprocess]


@pytest.fixture
def call(coordinator):
    """Calls a function on a worker; takes the error that `join` raises too."""

    def scheduled(fn, *args, **kwargs):
        value = coordinator.schedule(fn, args, kwargs)
        try:
            return value.fetch(clusters.SECONDS)
        except Exception as error:
            with pytest.raises(type(error)):
                coordinator.join(clusters.SECONDS)
            raise

    return scheduled


def numpy(value) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(value))


# Values of each worker


def test_values_of_workers_refer_to_each_other(strategy, coordinator, call) -> None:
    with strategy.scope():
        offset = keras.Variable(5.0, name="offset")
    rows = coordinator.create_per_worker_values(lambda: [1.0, 2.0])
    moved = coordinator.create_per_worker_values(
        lambda: [row + float(numpy(offset)) for row in rows]
    )
    assert call(lambda found: found, moved) == [6.0, 7.0]


# An iterator without more values


def test_it_does_not_end_loops_over_values(coordinator) -> None:
    dataset = coordinator.create_per_worker_dataset(lambda: range(2))
    iterator = iter(dataset)

    def fetched(_):
        return coordinator.schedule(next, (iterator,)).fetch(clusters.SECONDS)

    with pytest.raises(ks.errors.OutOfRangeError):
        list(map(fetched, range(50)))
    with pytest.raises(ks.errors.OutOfRangeError):
        coordinator.join(clusters.SECONDS)


# Errors and results with classes of the script


def test_errors_of_the_script_arrive_as_they_are(call) -> None:
    class Refused(Exception):
        def __init__(self, row: int, *, reason: str):
            super().__init__(f"row {row}: {reason}")
            self.row = row
            self.lock = threading.Lock()

    def refuse():
        raise Refused(3, reason="negative")

    with pytest.raises(Refused) as raised:
        call(refuse)
    assert (str(raised.value), raised.value.row) == ("row 3: negative", 3)
    assert any("in refuse" in note for note in raised.value.__notes__)


def test_results_of_the_script_arrive_as_they_are(call) -> None:
    @dataclasses.dataclass
    class Result:
        losses: np.ndarray
        names: list[str]

    Row = collections.namedtuple("Row", "number loss")
    large = call(lambda: Result(np.arange(10_000.0), ["a"]))
    assert type(large) is Result
    np.testing.assert_array_equal(large.losses, np.arange(10_000.0))
    row = call(lambda: Row(1, ops.ones(2)))
    assert type(row) is Row
    np.testing.assert_array_equal(row.loss, [1, 1])


def test_results_that_cannot_arrive_are_errors(strategy, call) -> None:
    class Unreadable:
        def __reduce__(self):
            return int, ("not a number",)

    with strategy.scope():
        metric = keras.metrics.Mean(name="loss")
    with pytest.raises(TypeError, match=r"lock.*Return arrays"):
        call(threading.Lock)
    with pytest.raises(TypeError, match=r"unpickled by the coordinator.*not a number"):
        call(Unreadable)
    with pytest.raises(TypeError, match=r"Mean.*metric.result"):
        call(lambda: [metric])
    assert call(lambda: 1) == 1


def test_a_function_that_exits_does_not_end_its_worker(call) -> None:
    with pytest.raises(ks.errors.WorkerError, match="SystemExit: 3"):
        call(sys.exit, 3)


# Keras objects as arguments


def test_variables_and_metrics_are_arguments(strategy, call) -> None:
    with strategy.scope():
        total = keras.Variable(1.0, name="total", trainable=False)
        one = keras.metrics.Mean(name="loss")
        other = keras.metrics.Mean(name="loss")

    def add(variable, x):
        variable.assign_add(x)
        return variable.value

    def update(metric, x):
        metric.update_state([1.0, x])

    assert float(call(add, total, 2.0)) == 3.0
    assert float(numpy(total)) == 3.0
    call(update, one, 3.0)
    assert float(numpy(one.result())) == 2.0

    def add_in_step(variables, x):
        strategy.run(lambda v: v["v"].assign_add(x), (variables,))

    def update_in_step(metric, x):
        # One step: metrics of the same name are not the same.
        strategy.run(update, (metric, x))

    call(add_in_step, {"v": total}, 4.0)
    assert float(numpy(total)) == 7.0
    call(update_in_step, one, 5.0)
    call(update_in_step, other, 9.0)
    assert float(numpy(one.result())) == 2.5
    assert float(numpy(other.result())) == 5.0


def test_models_and_optimizers_are_arguments(strategy, call) -> None:
    x = np.ones((4, 2), "float32")
    with strategy.scope():
        layers = [
            keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="same")
            for _ in range(2)
        ]
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([v for layer in layers for v in layer.trainable_variables])

    def replica_step(model, optimizer, x):
        loss_fn = lambda x: ops.sum(model(x))  # noqa: E731
        variables = model.trainable_variables
        _, gradients = ks.value_and_grad(loss_fn, variables)(x)
        optimizer.apply(gradients, variables)

    def step(model, optimizer):
        strategy.run(replica_step, (model, optimizer, x))

    before = [[numpy(v) for v in layer.weights] for layer in layers]
    for layer in layers:
        call(step, layer, optimizer)
    for layer, (kernel, bias) in zip(layers, before, strict=True):
        np.testing.assert_allclose(numpy(layer.weights[0]), kernel - 0.4, rtol=1e-5)
        np.testing.assert_allclose(numpy(layer.weights[1]), bias - 0.4, rtol=1e-5)


@pytest.mark.nightly(unless=["compile", "fit", "predict"])
@pytest.mark.parametrize(
    "name", ["compile", "fit", "evaluate", "predict", "train_on_batch"]
)
def test_methods_of_models_say_where_to_call_them(strategy, call, name) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    arguments = {"compile": ["sgd"], "predict": [np.ones((2, 2))]}.get(
        name, [np.ones((2, 2)), np.ones((2, 1))]
    )

    def train():
        return getattr(model, name)(*arguments)

    with pytest.raises(ks.errors.ContextError, match=rf"Call `model.{name}\(...\)` on"):
        call(train)
