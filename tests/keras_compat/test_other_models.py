"""Models and variables without a strategy have Keras's own methods."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import keras
import pytest
from harness.forker import run_code

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

SCRIPT = """
import json, sys
import keras, numpy as np
import keras_strategies as ks
from keras_strategies.keras_compat import patching

ks.set_virtual_cpu_devices(2)
X, Y = np.ones((8, 4), "float32"), np.ones((8, 2), "float32")
found = {"before": sorted(patching.installed)}

def model():
    layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
    made = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(2)])
    made.compile("adam", "mse", metrics=["mae"])
    return made

def traced(function):
    # What Keras code calls of this package, by what it stands before.
    names = set()
    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename == patching.__file__:
            original = frame.f_locals.get("original")
            names.add(getattr(original, "__qualname__", frame.f_code.co_name))
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return sorted(names)

def short_phases(made):
    weight = made.weights[0]
    made.train_on_batch(X, Y)  # It makes variables of the optimizer and of metrics.
    return {
        "call": traced(lambda: made(X)),
        "assign": traced(lambda: (weight.assign(weight), weight.numpy(), repr(weight))),
        "train_on_batch": traced(lambda: made.train_on_batch(X, Y)),
    }

def long_phases(made):
    return {
        "compile": traced(lambda: made.compile("sgd", "mse")),
        "fit": traced(lambda: made.fit(X, Y, verbose=0)),
        "evaluate": traced(lambda: made.evaluate(X, Y, verbose=0)),
        "predict": traced(lambda: made.predict(X, verbose=0)),
        "save": traced(lambda: made.save("model.keras")),
        "load": traced(lambda: made.load_weights("model.keras")),
    }

first = model()
strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
found["constructed"] = sorted(patching.installed)
with strategy.scope():
    own = model()
own.fit(X, Y, verbose=0)
found["made before"] = short_phases(first) | long_phases(first)
found["made after"] = short_phases(model())
found["make"] = traced(model)
strategy.run(lambda: keras.ops.ones(()))
own.evaluate(X, Y, verbose=0)  # What a loop of runs needs stays until a method ends.
found["after run"] = short_phases(first)
print(json.dumps(found))
"""
#: Called once for a dataset, which may be a distributed one, and for a new variable.
CALLED_ONCE = {"EpochIterator.__init__", "Variable.__init__"}
#: Called in each `apply`: one check of the thread's context.
ON_TENSORFLOW = {"TFOptimizer._all_reduce_sum_gradients"}


# One installer wraps what each backend's rows name, and fits under a profiler are slow.
@pytest.mark.nightly
@pytest.mark.one_backend("torch")
def test_they_run_through_no_wrapper(tmp_path: Path) -> None:
    code = f"import os; os.chdir({str(tmp_path)!r})\n{SCRIPT}"
    found = json.loads(run_code(tmp_path, code).splitlines()[-1])
    assert found["before"] == found["constructed"] == []
    checks = ON_TENSORFLOW if keras.backend.backend() == "tensorflow" else set()
    for name in ("made before", "made after", "after run"):
        called = {phase: {*names} - checks for phase, names in found[name].items()}
        # A file is read as a stream if variables are on parameter servers.
        read = {"load_weights", "is_installed", *CALLED_ONCE}
        assert called.pop("load", set()) <= read
        assert set().union(*called.values()) <= CALLED_ONCE, called
        for phase in ("call", "assign", "train_on_batch"):
            assert called[phase] == set()
    made = {n.rpartition(".")[2] for n in found["make"]}
    # On JAX `run` draws rows, and its patch of `jax.random.uniform` stays.
    drawn = {"uniform"} if keras.backend.backend() == "jax" else set()
    assert made - drawn == {"__init__"}


def test_a_model_of_a_strategy_is_one_of_its_class(mirrored: ks.Strategy) -> None:
    class Small(keras.Model):
        def call(self, x):
            return x

    with mirrored.scope():
        made = [keras.Sequential([keras.layers.Dense(1)]), Small(), keras.Model()]
        made.append(keras.Model(x := keras.Input((2,)), keras.layers.Dense(1)(x)))
    kinds = [keras.Sequential, Small, keras.Model, keras.src.models.Functional]
    for model, kind in zip(made, kinds, strict=True):
        assert model.__class__ is kind
        assert isinstance(model, kind)
        assert type(model).__name__ == kind.__name__
        with mirrored.scope():
            assert type(kind.__new__(kind)) is kind


def test_a_model_of_a_strategy_is_pickled(mirrored: ks.Strategy) -> None:
    with mirrored.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    copy = pickle.loads(pickle.dumps(model))
    assert type(copy) is keras.Sequential
    assert (copy.get_weights()[0] == model.get_weights()[0]).all()


def test_a_model_of_another_place_is_refused_in_a_scope(mirrored: ks.Strategy) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with mirrored.scope(), pytest.raises(ks.errors.ModelScopeError, match="`compile`"):
        model.compile("sgd", "mse")
    model.compile("sgd", "mse")
