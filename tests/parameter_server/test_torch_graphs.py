"""Torch: steps of parameter servers' workers, and updates, as recorded graphs."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)

import torch

from keras_strategies.keras_compat import hooks, patching
from keras_strategies.keras_compat.models.keras_classes import uses_only_builtin_keras
from keras_strategies.keras_compat.variables.creation import (
    OpenShape,
    set_variable_shape,
)
from keras_strategies.parameter_server.engines.engine_interface import (
    CompilableStep,
    bucket,
)
from keras_strategies.parameter_server.engines.torch_engine import (
    TorchParameterServerEngine,
)
from keras_strategies.parameter_server.engines.torch_graphs import (
    GraphRecorder,
    NotRecordableError,
    TensorGraph,
)
from keras_strategies.training.model_hooks import StrategyHooks

ENGINE = TorchParameterServerEngine()
ROWS, IDS = 50, 4


class Counting(keras.layers.Layer):
    """Multiplies by the number of times that it was called."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x * self.calls


def model(*middle, **options):
    keras.utils.set_random_seed(1)
    made = keras.Sequential(
        [
            keras.Input((IDS,), dtype="int32"),
            keras.layers.Embedding(ROWS, 3),
            keras.layers.Flatten(),
            *middle,
            keras.layers.Dense(2, "relu", kernel_regularizer="l2"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    made.compile("adagrad", "mse", metrics=["mae", keras.metrics.AUC()], **options)
    return made


def batch(rows: int = 6, weights: bool = True):
    random = np.random.default_rng(rows)
    x = random.integers(0, ROWS, (rows, IDS), dtype="int32")
    y = random.integers(0, 2, (rows, 1)).astype("float32")
    return (x, y, random.uniform(size=rows).astype("float32") if weights else None)


def program(made, kind: str = "train"):
    """The step of a model, as a worker has it."""
    hooks.install(StrategyHooks())
    patching.install("parameter servers")
    # Makes the variables of metrics; Keras's own way of compiling takes a minute.
    compiles, made.jit_compile = made.jit_compile, False
    made.train_on_batch(*batch()[:2])
    made.jit_compile = compiles
    table = made.layers[0].embeddings
    left_out = {id(v) for v in (table, *made.optimizer.variables)}
    held = {id(v): v for v in (*made.variables, *made.metrics_variables)}
    others = [v for key, v in held.items() if key not in left_out]
    variables = SimpleNamespace(tables=[table], others=others)
    set_variable_shape(table, OpenShape((ROWS, 3)))
    whole = keras.ops.convert_to_numpy(table.value)
    found = ENGINE.program(ENGINE.model_body(made, kind), variables, kind == "train")
    return found, table, whole


def step(found, table, whole, given):
    lookups = found.lookups(given)
    [(_, ids)] = lookups
    rows, where = np.unique(ids, return_inverse=True)
    window = np.zeros((bucket(len(rows)), 3), "float32")
    window[: len(rows)] = whole[rows]
    ENGINE.set_value(table, window)
    places = [where.reshape(ids.shape).astype("int32")]
    return (
        found.run(given, lookups, places),
        found._run_eagerly(given, lookups, places),
    )


def assert_alike(one, other) -> None:
    assert one.outputs.keys() == other.outputs.keys()
    for name in one.outputs:
        np.testing.assert_allclose(one.outputs[name], other.outputs[name], rtol=1e-6)
    [ours], [theirs] = one.optimizer_calls, other.optimizer_calls
    assert ours.optimizer is theirs.optimizer
    assert list(map(id, ours.variables)) == list(map(id, theirs.variables))
    for mine, expected in zip(ours.gradients, theirs.gradients, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-7)
    assert [id(v) for v, _ in one.changed] == [id(v) for v, _ in other.changed]
    for (_, mine), (_, expected) in zip(one.changed, other.changed, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-6)


def graphs(found) -> int:
    return sum(
        graph is not None
        for recorder in found._recorders.values()
        for graph in recorder._graphs.values()
    )


def test_a_recorded_step_does_what_the_step_does():
    found = program(model(keras.layers.Dropout(0.0)))
    # Two sizes of batches, with weights and without, in turn.
    for weights in (True, False):
        for rows in (6, 3, 6, 3, 6, 3):
            one, other = step(*found, batch(rows, weights))
            assert_alike(one, other)
    assert graphs(found[0]) == 4


def test_a_layer_of_the_users_is_called_in_each_step():
    made = model(Counting())
    assert not isinstance(ENGINE.model_body(made, "train"), CompilableStep)
    layer = made.layers[2]
    found = program(made)
    before = layer.calls
    for _ in range(3):
        step(*found, batch())
    # Once to foresee the ids, and twice for each of the steps.
    assert layer.calls == before + 1 + 2 * 3


def test_users_may_ask_for_a_graph():
    class Doubling(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    found = program(model(Doubling(), jit_compile=True))
    for _ in range(3):
        assert_alike(*step(*found, batch()))
    assert graphs(found[0]) == 1


def test_eager_models_are_not_recorded():
    assert not isinstance(
        ENGINE.model_body(model(run_eagerly=True), "train"), CompilableStep
    )


def test_random_numbers_of_a_seed_are_drawn_anew_in_each_step():
    found, table, whole = program(model(keras.layers.Dropout(0.5, seed=3)))
    results = []
    for _ in range(4):
        one, _ = step(found, table, whole, batch())
        for variable, value in one.changed:
            if "seed" in variable.path:
                ENGINE.set_value(variable, value)
        results.append(float(one.outputs["mae"]))
    assert len(set(results)) == 4
    assert graphs(found) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x, -x][int(x.item()) - 2],
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: x if x > 0 else -x,
        lambda x: x + torch.ones(()).numpy() if bool(x.sum()) else x,
    ],
    ids=["index", "numpy", "branch", "bool"],
)
def test_what_depends_on_numbers_is_not_recorded(function, caplog):
    recorder = GraphRecorder(lambda x: (function(x), None), is_requested=True)
    inputs = [torch.tensor(2.0)]
    assert [recorder.graph(inputs) for _ in range(3)] == [None, None, None]
    # Said once, where a graph was asked for.
    assert caplog.text.count("Run eagerly, not as a graph") == 1
    with pytest.raises(NotRecordableError):
        TensorGraph(lambda x: (function(x), None), inputs)


def test_a_tensor_that_is_no_input_is_not_recorded():
    other = torch.tensor(5.0)
    with pytest.raises(NotRecordableError):
        TensorGraph(lambda x: (x + other, None), [torch.tensor(2.0)])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: model(), True),
        (lambda: model(Counting()), False),
        (lambda: model(keras.layers.Lambda(lambda x: x)), False),
        (lambda: model(keras.layers.Dense(3, activation=lambda x: x)), False),
        (
            lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1, 2)),
            True,
        ),
    ],
    ids=["Keras's", "layer", "Lambda", "activation", "optimizer"],
)
def test_whose_code_a_model_calls(make, expected):
    assert uses_only_builtin_keras(make()) == expected


def test_a_loss_of_the_users_is_not_kerass():
    made = model()
    made.compile("sgd", lambda y, p: keras.ops.mean(y - p))
    assert not uses_only_builtin_keras(made)


def adagrad(scalars, values, slots, gradients):
    """An update as a server is given it, of arrays that it may write into."""
    [rate] = scalars
    for value, [kept], gradient in zip(values, slots, gradients, strict=True):
        kept.add_(gradient * gradient)
        value.sub_(rate * gradient / torch.sqrt(kept + 1e-7))
    return [rate + 1], values, slots


def large(size: int):
    random = np.random.default_rng(size)
    arrays = random.uniform(0.1, 1, (3, size)).astype("float32")
    return [np.float32(0.5).reshape(())], [arrays[0]], [[arrays[1]]], [arrays[2]]


def updated(size: int, is_recorded: bool, calls: int = 6):
    """What several updates come to, and the recorder of the last."""
    update = ENGINE.compile_update(adagrad, is_recorded)
    scalars, values, slots, gradients = large(size)
    for _ in range(calls):
        _, values, slots = update(scalars, values, slots, gradients)
    return values[0], slots[0][0], update._recorder


def is_fused(recorder) -> bool:
    [graph] = recorder._graphs.values()
    return graph.is_fused


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
def test_updates_of_large_arrays_are_fused_and_in_place() -> None:
    value, kept, recorder = updated(300_000, True)
    assert is_fused(recorder)
    expected = updated(300_000, False)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(kept, expected[1], rtol=1e-6, atol=1e-6)
    update = ENGINE.compile_update(adagrad, True)
    scalars, values, slots, gradients = large(300_000)
    for _ in range(6):
        _, [after], [[after_kept]] = update(scalars, values, slots, gradients)
        assert after is values[0] and after_kept is slots[0][0]
