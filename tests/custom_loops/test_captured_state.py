"""Replica functions compute with the values of the moment of each `run`.

Each case runs a function several times, with a change of a value in between.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import functools
import io
import itertools
import operator
import os
import random
import sys
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

TABLE = np.array([2.0, 2.0], "float32")
LARGE = np.full(70_000, 2.0, "float32")
SETTINGS = {"rates": [2.0]}
GLOBAL = 2.0

Change = Callable[[], None]


def first(strategy: Any, fn: Callable[[Any], Any]) -> float:
    x = ks.PerReplica([ops.ones(()), ops.ones(()) * 10])
    found = [float(part) for part in strategy.run(fn, args=(x,)).values]
    assert found[1] == 10 * found[0]
    return found[0]


@dataclasses.dataclass
class Options:
    rate: float = 2.0
    calls: int = 0


class Config:
    rate = 2.0


class Scaled:
    """Its operators read what no code of a step names."""

    def __init__(self) -> None:
        self._factor = 2.0

    def __mul__(self, x: Any) -> Any:
        return x * self._factor

    def __getitem__(self, name: str) -> float:
        return self._factor

    def __call__(self, x: Any) -> Any:
        return x * self._factor

    def _inner(self, x: Any) -> Any:
        return x * GLOBAL

    def outer(self, x: Any) -> Any:
        return self._inner(x)


class DotDict:
    def __init__(self, **values: float) -> None:
        self.__dict__["_values"] = values

    def __getattr__(self, name: str) -> float:
        return self._values[name]


@keras.saving.register_keras_serializable("captured")
class Scale(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self._rates = {"rate": 2.0}

    def call(self, x: Any) -> Any:
        return x * self._rates["rate"] * GLOBAL / 2


def set_global(value: float) -> None:
    globals()["GLOBAL"] = value


@pytest.fixture(autouse=True)
def constants():
    yield
    set_global(2.0)
    TABLE[:] = 2.0
    LARGE[:] = 2.0
    SETTINGS["rates"][0] = 2.0
    Config.rate = 2.0
    os.environ.pop("KS_TEST_RATE", None)


def array_in_a_closure() -> tuple[Any, Change]:
    table = np.array([2.0], "float32")
    return lambda x: x * table[0], lambda: table.fill(3.0)


def array_of_the_module() -> tuple[Any, Change]:
    return lambda x: x * TABLE[1], lambda: operator.setitem(TABLE, 1, 3.0)


def one_number_of_a_large_array() -> tuple[Any, Change]:
    def change() -> None:
        LARGE[33_333] = 3.0

    return lambda x: x * LARGE[33_333], change


def view_of_an_array() -> tuple[Any, Change]:
    table = np.array([2.0, 2.0, 2.0], "float32")
    view = table[::2]
    return lambda x: x * view[1], lambda: operator.setitem(table, 2, 3.0)


def array_of_objects() -> tuple[Any, Change]:
    table = np.array([2.0, None], object)
    return lambda x: x * table[0], lambda: operator.setitem(table, 0, 3.0)


def mask_of_an_array() -> tuple[Any, Change]:
    table = np.ma.MaskedArray([2.0, 4.0], [False, True])
    return lambda x: x * table.sum(), lambda: operator.setitem(
        table, slice(None), np.ma.MaskedArray([3.0, 4.0], [False, True])
    )


def array_as_a_default() -> tuple[Any, Change]:
    table = np.array([2.0], "float32")

    def step(x: Any, table: Any = table) -> Any:
        return x * table[0]

    return step, lambda: table.fill(3.0)


def array_of_an_object() -> tuple[Any, Change]:
    options = types.SimpleNamespace(table=np.array([2.0], "float32"))
    return lambda x: x * options.table[0], lambda: options.table.fill(3.0)


def array_in_a_dictionary() -> tuple[Any, Change]:
    tables = {"one": [np.array([2.0], "float32")]}
    return lambda x: x * tables["one"][0][0], lambda: tables["one"][0].fill(3.0)


def buffer_of_python() -> tuple[Any, Change]:
    numbers = array.array("d", [2.0])
    return lambda x: x * numbers[0], lambda: operator.setitem(numbers, 0, 3.0)


def queue() -> tuple[Any, Change]:
    numbers = collections.deque([2.0])
    return lambda x: x * numbers[0], lambda: operator.setitem(numbers, 0, 3.0)


def list_of_the_module() -> tuple[Any, Change]:
    rates = SETTINGS["rates"]
    return lambda x: x * SETTINGS["rates"][0], lambda: operator.setitem(rates, 0, 3.0)


def name_of_the_module() -> tuple[Any, Change]:
    return lambda x: x * GLOBAL, lambda: set_global(3.0)


def name_read_by_an_inner_method() -> tuple[Any, Change]:
    return Scaled().outer, lambda: set_global(3.0)


def attribute_of_a_class() -> tuple[Any, Change]:
    return lambda x: x * Config.rate, lambda: setattr(Config, "rate", 3.0)


def attribute_of_an_objects_class() -> tuple[Any, Change]:
    config = Config()
    return lambda x: x * config.rate, lambda: setattr(Config, "rate", 3.0)


def attribute_read_by_a_helper() -> tuple[Any, Change]:
    options = Options()

    def helper(x: Any, given: Any) -> Any:
        return x * given.rate

    return lambda x: helper(x, options), lambda: setattr(options, "rate", 3.0)


def attribute_read_by_an_operator() -> tuple[Any, Change]:
    scaled = Scaled()
    return lambda x: scaled * x, lambda: setattr(scaled, "_factor", 3.0)


def attribute_read_by_an_index() -> tuple[Any, Change]:
    scaled = Scaled()
    return lambda x: scaled["rate"] * x, lambda: setattr(scaled, "_factor", 3.0)


def attribute_of_a_callable() -> tuple[Any, Change]:
    scaled = Scaled()
    return scaled, lambda: setattr(scaled, "_factor", 3.0)


def attribute_by_getattr() -> tuple[Any, Change]:
    options, name = Options(), "".join(("ra", "te"))
    return lambda x: x * getattr(options, name), lambda: setattr(options, name, 3.0)


def attribute_by_vars() -> tuple[Any, Change]:
    options = Options()
    return lambda x: x * sum(vars(options).values()), lambda: setattr(
        options, "rate", 3.0
    )


def attribute_by_a_getter() -> tuple[Any, Change]:
    options, get = Options(), operator.attrgetter("rate")
    return lambda x: x * get(options), lambda: setattr(options, "rate", 3.0)


def attribute_by_match() -> tuple[Any, Change]:
    options = Options()

    def step(x: Any) -> Any:
        match options:
            case Options(rate):
                return x * rate

    return step, lambda: setattr(options, "rate", 3.0)


def attribute_of_a_dot_dictionary() -> tuple[Any, Change]:
    config = DotDict(rate=2.0)
    return lambda x: x * config.rate, lambda: operator.setitem(
        config._values, "rate", 3.0
    )


def attribute_of_a_function() -> tuple[Any, Change]:
    def step(x: Any) -> Any:
        return x * step.rate

    step.rate = 2.0
    return step, lambda: setattr(step, "rate", 3.0)


def bound_method_of_a_dictionary() -> tuple[Any, Change]:
    rates = {"rate": 2.0}
    get = rates.get
    return lambda x: x * get("rate"), lambda: operator.setitem(rates, "rate", 3.0)


def weak_reference() -> tuple[Any, Change]:
    options = Options()
    reference = weakref.ref(options)

    def change() -> None:
        options.rate = 3.0

    return lambda x: x * reference().rate, change


def module_imported_inside() -> tuple[Any, Change]:
    module = sys.modules["settings_of_a_test"] = types.ModuleType("settings_of_a_test")
    module.RATE = 2.0

    def step(x: Any) -> Any:
        import settings_of_a_test

        return x * settings_of_a_test.RATE

    return step, lambda: setattr(module, "RATE", 3.0)


def wrapped_function() -> tuple[Any, Change]:
    table = np.array([2.0], "float32")

    def decorated(fn: Any) -> Any:
        @functools.wraps(fn)
        def wrapper(*args: Any) -> Any:
            return fn(*args)

        return wrapper

    return decorated(lambda x: x * table[0]), lambda: table.fill(3.0)


def private_attribute_of_a_layer() -> tuple[Any, Change]:
    layer = Scale()
    return layer, lambda: operator.setitem(layer._rates, "rate", 3.0)


def name_read_by_a_layer_in_a_model() -> tuple[Any, Change]:
    model = keras.Sequential([Scale()])
    return model, lambda: set_global(3.0)


def name_in_a_string() -> tuple[Any, Change]:
    return lambda x: x * eval("GLOBAL"), lambda: set_global(3.0)


def variable_of_the_environment() -> tuple[Any, Change]:
    os.environ["KS_TEST_RATE"] = "2"

    def step(x: Any) -> Any:
        return x * float(os.environ["KS_TEST_RATE"])

    return step, lambda: operator.setitem(os.environ, "KS_TEST_RATE", "3")


def contents_of_a_file() -> tuple[Any, Change]:
    file = io.StringIO("2.0")
    return lambda x: x * float(file.getvalue()), lambda: file.write("3.0") and None


def setting_of_a_loss() -> tuple[Any, Change]:
    loss = keras.losses.Huber(delta=1000.0, reduction="sum")
    loss._fn_kwargs = {"delta": 1000.0}

    class Weighted(keras.losses.Loss):
        weight = 2.0

        def call(self, y_true: Any, y_pred: Any) -> Any:
            return (y_pred - y_true) * self.weight

    own = Weighted(reduction="none")
    return lambda x: own(ops.zeros((1,)), ops.reshape(x, (1,)))[0], lambda: setattr(
        own, "weight", 3.0
    )


CASES = [
    array_in_a_closure,
    array_of_the_module,
    one_number_of_a_large_array,
    view_of_an_array,
    array_of_objects,
    mask_of_an_array,
    array_as_a_default,
    array_of_an_object,
    array_in_a_dictionary,
    buffer_of_python,
    queue,
    list_of_the_module,
    name_of_the_module,
    name_read_by_an_inner_method,
    attribute_of_a_class,
    attribute_of_an_objects_class,
    attribute_read_by_a_helper,
    attribute_read_by_an_operator,
    attribute_read_by_an_index,
    attribute_of_a_callable,
    attribute_by_getattr,
    attribute_by_vars,
    attribute_by_a_getter,
    attribute_by_match,
    attribute_of_a_dot_dictionary,
    attribute_of_a_function,
    bound_method_of_a_dictionary,
    weak_reference,
    module_imported_inside,
    wrapped_function,
    private_attribute_of_a_layer,
    name_read_by_a_layer_in_a_model,
    name_in_a_string,
    variable_of_the_environment,
    contents_of_a_file,
    setting_of_a_loss,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_change_between_two_runs_counts(mirrored, case) -> None:
    with mirrored.scope():
        fn, change = case()
    assert [first(mirrored, fn) for _ in range(3)] == [2.0] * 3
    change()
    assert [first(mirrored, fn) for _ in range(2)] == [3.0] * 2


def test_the_sign_of_a_zero_counts(mirrored) -> None:
    options = Options(0.0)

    def step(x: Any) -> Any:
        return x / np.float32(options.rate)

    assert first(mirrored, step) == np.inf
    options.rate = -0.0
    assert first(mirrored, step) == -np.inf


def test_the_float_type_of_keras_counts(mirrored) -> None:
    before = keras.config.floatx()

    def step() -> Any:
        return ops.ones((1,))

    try:
        for floatx in ("float32", "float16"):
            keras.config.set_floatx(floatx)
            [found, _] = mirrored.run(step).values
            assert keras.backend.standardize_dtype(found.dtype) == floatx
    finally:
        keras.config.set_floatx(before)


def test_settings_of_an_optimizer_count(mirrored) -> None:
    with mirrored.scope():
        variable = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([variable])

    def step() -> None:
        optimizer.apply([ops.ones(())], [variable])

    mirrored.run(step)
    assert float(variable.numpy()) == -2.0
    optimizer.clipvalue = 0.5
    mirrored.run(step)
    after = float(variable.numpy())
    assert after in (-2.5, -3.0)  # Clipped after or before the sum over replicas.


def test_a_variable_that_is_frozen_is_not_trained(mirrored) -> None:
    with mirrored.scope():
        variable = keras.Variable(2.0)
    variables = [variable]

    def step() -> Any:
        _, [gradient] = ks.value_and_grad(lambda: variables[0] * 3.0, variables)()
        return ops.zeros(()) if gradient is None else gradient

    assert float(mirrored.run(step).values[0]) == 3.0
    variable.trainable = False
    assert float(mirrored.run(step).values[0]) == 0.0


COUNT = itertools.count()
FLOATS = [float(i) for i in range(1000)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: float(np.random.random()),
        random.random,
        np.random.default_rng(0).random,
        np.random.RandomState(0).random_sample,
        random.Random(0).random,
        lambda: float(next(COUNT)),
        lambda numbers=(each for each in FLOATS): next(numbers),
        functools.partial(next, iter(FLOATS)),
    ],
    ids=(
        *("numpy", "python", "Generator", "RandomState"),
        *("Random", "count", "generator", "iterator"),
    ),
)
def test_numbers_that_python_draws_differ_in_each_run(mirrored, draw) -> None:
    def step(x: Any) -> Any:
        return x + draw()

    x = ks.PerReplica([ops.zeros(()), ops.zeros(())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        found = [float(mirrored.run(step, args=(x,)).values[0]) for _ in range(4)]
    assert len(set(found)) == 4


@pytest.mark.one_backend("jax")
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="compiled on JAX only")
def test_a_training_step_is_compiled_once(mirrored, monkeypatch) -> None:
    """It is traced in each call, and has an equal trace."""
    import jax

    with mirrored.scope():
        model = keras.Sequential(
            [layers.Dense(4, "relu"), layers.BatchNormalization(), layers.Dropout(0.5)]
        )
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        optimizer = keras.optimizers.Adam(schedule)
        metric = keras.metrics.Mean()
        model.build((None, 3))
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.MeanSquaredError(reduction="none")
    programs, compile = [], jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered,
        "compile",
        lambda self: programs.append(self) or compile(self),
    )

    def step(x: Any) -> Any:
        def loss_fn() -> Any:
            return ops.mean(loss_of(ops.zeros((2, 4)), model(x, training=True)))

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(loss_fn, variables)()
        optimizer.apply(gradients, variables)
        metric.update_state(loss)
        return loss

    x = ks.PerReplica([ops.ones((2, 3)), ops.ones((2, 3))])
    for _ in range(4):
        mirrored.run(step, args=(x,))
    assert len(programs) == 1


def test_models_share_a_function_by_its_code(mirrored) -> None:
    """State of one model is neither read nor changed by a run of another."""
    with mirrored.scope():
        variables = [keras.Variable(float(i)) for i in range(3)]

    def step(variable: Any) -> Callable[[], Any]:
        return lambda: variable.assign_add(10.0)

    for _ in range(2):
        for variable in variables:
            mirrored.run(step(variable))
    assert [float(variable.numpy()) for variable in variables] == [20.0, 21.0, 22.0]


@pytest.mark.one_backend("jax")
@pytest.mark.skipif(keras.backend.backend() != "jax", reason="of programs on JAX")
def test_a_run_without_ks_function_is_named_once(mirrored, caplog) -> None:
    def step() -> Any:
        return ops.ones(())

    for _ in range(45):
        mirrored.run(step)
    found = [each for each in caplog.messages if "outside of `ks.function`" in each]
    assert len(found) == 1
    assert "test_a_run_without_ks_function_is_named_once.<locals>.step" in found[0]
