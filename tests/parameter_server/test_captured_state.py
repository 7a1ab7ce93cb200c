"""What functions refer to: sent again when it changed, and changes that would be lost.

In `tf.distribute` a function is traced once: Python objects are those of the trace,
`layer.trainable` is that of the trace, and each `tf.Variable` is a resource that all
workers share.
"""

from __future__ import annotations

import functools
import sys
import warnings

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.parameter_server.variables.captured_state import CapturedState
from parameter_server import clusters

pytestmark = pytest.mark.one_backend

GLOBAL = {"scale": 1.0}


def of_the_module():
    return lambda: GLOBAL["scale"], lambda value: GLOBAL.update(scale=value)


def of_a_default():
    scale = [1.0]
    return lambda by=scale: by[0], lambda value: scale.__setitem__(0, value)


def of_a_method():
    class Scaled:
        rows = 1.0

        def scale(self) -> float:
            return self.rows

    scaled = Scaled()
    return scaled.scale, lambda value: setattr(scaled, "rows", value)


def of_a_partial_function():
    rows = np.ones(3)
    return functools.partial(lambda rows: float(rows[0]), rows), rows.fill


WAYS = of_the_module, of_a_default, of_a_method, of_a_partial_function


@pytest.mark.multiprocess
@pytest.mark.parametrize("way", WAYS)
def test_what_changed_is_sent_again(strategy, coordinator, way) -> None:
    function, change = way()
    for value in (1.0, 5.0, 5.0, 7.0):
        change(value)
        assert coordinator.schedule(function).fetch(clusters.SECONDS) == value
        assert strategy.run(function) == value


@pytest.mark.multiprocess
def test_a_layer_that_is_frozen_later_is_not_trained(strategy, coordinator) -> None:
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((2,)),
                keras.layers.Dense(2, kernel_initializer="ones", use_bias=False),
                keras.layers.Dense(1, kernel_initializer="ones", use_bias=False),
            ]
        )
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

    def step(x):
        def replica_step(x):
            variables = model.trainable_variables
            _, gradients = ks.value_and_grad(
                lambda: keras.ops.sum(model(x, training=True)), variables
            )()
            optimizer.apply(gradients, variables)

        strategy.run(replica_step, (x,))

    x = np.ones((1, 2), "float32")
    first, last = (layer.kernel for layer in model.layers)
    before = [v.numpy() for v in (first, last)]
    coordinator.schedule(step, (x,)).fetch(clusters.SECONDS)
    between = [v.numpy() for v in (first, last)]
    model.layers[0].trainable = False
    coordinator.schedule(step, (x,)).fetch(clusters.SECONDS)
    after = [v.numpy() for v in (first, last)]
    assert (between[0] != before[0]).all() and (between[1] != before[1]).all()
    np.testing.assert_array_equal(after[0], between[0])
    assert (after[1] != between[1]).all()


@pytest.mark.multiprocess
def test_changes_of_a_workers_copy_are_warned_about_once(strategy, coordinator) -> None:
    seen, counter, counts = [], {"n": 0}, np.zeros(2)
    with strategy.scope():
        total = keras.Variable(0.0, trainable=False)

    def count():
        seen.append(1)
        counter["n"] += 1
        counts[0] += 1
        total.assign_add(1.0)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(6):
            coordinator.schedule(count)
        coordinator.join(clusters.SECONDS)
    texts = [str(each.message) for each in found if "has a copy" in str(each.message)]
    assert len(texts) == 1
    assert "'count'" in texts[0] and "counter, counts, seen" in texts[0]
    assert float(total.numpy()) == 6


@pytest.mark.multiprocess
def test_a_variable_of_tensorflow_is_refused(
    strategy, coordinator, backend_name
) -> None:
    if backend_name != "tensorflow":
        pytest.skip("TensorFlow's")
    import tensorflow as tf

    with strategy.scope():
        variable = tf.Variable([0.0, 1.0], name="mine")
    for call in (coordinator.schedule, strategy.run):
        with pytest.raises(TypeError, match=r"'mine:0', a .*Variable of shape \(2,\)"):
            call(lambda: variable.assign_add([1.0, 1.0]))
    with pytest.raises(TypeError, match=r"a `keras\.Variable` in"):
        coordinator.schedule(lambda v: v, (variable,))


@pytest.mark.multiprocess
def test_tensors_of_torch_that_would_be_changed_in_vain_are_errors(
    strategy, coordinator, backend_name
) -> None:
    if backend_name != "torch":
        pytest.skip("Torch's")
    import torch

    def call(fn):
        try:
            return coordinator.schedule(fn).fetch(clusters.SECONDS)
        finally:
            with pytest.raises(ValueError, match="changed tensors"):
                coordinator.join(clusters.SECONDS)

    tensor, weight = torch.zeros(2), torch.nn.Parameter(torch.zeros(2))
    norm, once = torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)

    def add():
        with torch.no_grad():
            weight.add_(1)

    def backward():
        once(torch.ones(3, 2)).sum().backward()

    def normalize():
        norm(torch.ones(3, 2))

    for change in (lambda: tensor.add_(1).sum(), add, backward, normalize):
        for _ in range(2):
            with pytest.raises(ValueError, match=r"of shape \(.*keras.Variable"):
                call(change)
    # Tensors are read as they are, and sent again when they have changed here.
    tensor += 3
    read = coordinator.schedule(lambda: tensor * 2).fetch(clusters.SECONDS)
    np.testing.assert_array_equal(read, [6, 6])
    norm.eval()
    assert coordinator.schedule(lambda: norm(torch.ones(3, 2)).shape[0]).fetch() == 3


def many_layers(count: int) -> keras.Model:
    layers = [keras.layers.Dense(2, use_bias=False) for _ in range(count)]
    return keras.Sequential([keras.Input((2,)), *layers])


def test_the_cost_of_finding_changes_of_a_model() -> None:
    """Calls of Python functions at each `schedule`, for a layer of the model."""
    model = many_layers(100)
    state = CapturedState(lambda: model)
    calls = 0

    def count(frame, event, argument) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        assert state.changes(lambda: model) == []
    finally:
        sys.setprofile(None)
    assert calls < 5 * 100
    model.layers[50].trainable = False
    assert state.changes(lambda: model) == ["model"]


@pytest.mark.multiprocess
def test_a_model_of_many_layers_is_sent(strategy, coordinator) -> None:
    with strategy.scope():
        model = many_layers(120)
    x = np.ones((3, 2), "float32")
    inner = model.layers[-1]

    def call(x):
        assert model.layers[-1] is inner
        inner.found = len(model.layers)
        return keras.ops.convert_to_numpy(inner(x))

    found = coordinator.schedule(call, (x,)).fetch(clusters.SECONDS)
    expected = keras.ops.convert_to_numpy(inner(x))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    again = coordinator.schedule(lambda layer: layer.found, (inner,))
    assert again.fetch(clusters.SECONDS) == 120
