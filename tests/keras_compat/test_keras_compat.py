"""Patched attributes of Keras exist, and are restored."""

from __future__ import annotations

import contextlib
import threading

import keras
import numpy as np
import pytest
from keras.src.backend.common import global_state

from keras_strategies.keras_compat import hooks, patching
from keras_strategies.keras_compat.backends.keras_on_tensorflow import is_in_optimizer
from keras_strategies.keras_compat.models.building import is_built, symbolic_build
from keras_strategies.keras_compat.optimizers.applying import (
    applying_through,
    slot_reference,
)
from keras_strategies.keras_compat.optimizers.optimizer_classes import plain_optimizer
from keras_strategies.keras_compat.optimizers.optimizer_parts import (
    optimizers_of,
    variable_rate,
)
from keras_strategies.keras_compat.thread_state import (
    current_stateless_scope,
    kept_scope_state,
    thread_state,
    with_thread_state,
)
from keras_strategies.keras_compat.variables.generator_seeds import (
    is_seed_state,
    substitute_global_generator,
)
from keras_strategies.training.model_hooks import StrategyHooks

pytestmark = pytest.mark.one_backend


def test_hooks_are_installed_once_and_taken_out_again(mirrored) -> None:
    with mirrored.scope():
        pass
    assert patching.is_installed("strategies")
    originals = [row for rows in patching.installed.values() for row in rows]
    names = {(owner.__name__, name) for owner, name, _ in originals}
    assert {("Variable", "__init__"), ("EpochIterator", "__init__")} <= names
    for owner, name, original in originals:
        assert owner.__dict__[name].__wrapped__ is original
    patching.uninstall()
    try:
        for owner, name, original in originals:
            assert owner.__dict__[name] is original
    finally:
        hooks.install(StrategyHooks())


def test_seed_states_have_the_name_that_they_are_known_by() -> None:
    generator = keras.random.SeedGenerator(1)
    assert is_seed_state(generator.state)
    assert not is_seed_state(keras.Variable(1.0, name="v"))


def test_a_draw_without_a_seed_creates_keras_generator_once() -> None:
    keras.utils.set_random_seed(3)
    expected = keras.ops.convert_to_numpy(keras.random.normal((2,)))
    keras.utils.set_random_seed(3)
    global_state.set_global_attribute("global_seed_generator", None)
    with substitute_global_generator() as substitute:
        keras.random.normal((2,))
    assert substitute is not None and substitute.was_used
    found = keras.ops.convert_to_numpy(keras.random.normal((2,)))
    np.testing.assert_array_equal(found, expected)
    with substitute_global_generator() as substitute:
        assert substitute is None


def test_a_step_is_built_from_shapes_alone() -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    assert not is_built(model)
    batch = (keras.KerasTensor((None, 3)), keras.KerasTensor((None, 2)))
    symbolic_build(model, batch)
    assert is_built(model)
    assert model.optimizer.built


def test_thread_state_is_copied_and_put_back() -> None:
    with keras.StatelessScope():
        state = thread_state()
        assert state["stateless_scope"] is not None
    with with_thread_state(state):
        assert current_stateless_scope() is state["stateless_scope"]
    assert current_stateless_scope() is None


def test_threads_at_the_same_time_have_scopes_of_their_own() -> None:
    """Keras changes the stacks of name scopes and of `RematScope` in place."""
    from keras.src.backend.common.name_scope import current_path
    from keras.src.backend.common.remat import get_current_remat_mode

    barrier, found = threading.Barrier(2, timeout=60), {}

    def in_scopes(state, name: str) -> None:
        with with_thread_state(state):
            for turn in ("one", "two"):
                with contextlib.ExitStack() as stack:
                    if turn == name:
                        stack.enter_context(keras.name_scope(f"of_{name}"))
                        stack.enter_context(keras.RematScope("full"))
                    barrier.wait()
                    found[name, turn] = (current_path(), get_current_remat_mode())
                    barrier.wait()

    with keras.name_scope("caller"), keras.RematScope(None):
        state = thread_state()
        threads = [
            threading.Thread(target=in_scopes, args=(state, name))
            for name in ("one", "two")
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current_path() == "caller"
    paths = {key: path for key, (path, _) in found.items()}
    assert paths == {
        ("one", "one"): "caller/of_one",
        ("one", "two"): "caller",
        ("two", "one"): "caller",
        ("two", "two"): "caller/of_two",
    }
    # Keras 3.16 has no mode in a scope of None.
    modes = {key: mode and mode.mode for key, (_, mode) in found.items()}
    assert modes == {key: "full" if len(set(key)) == 1 else None for key in paths}


def test_variables_of_optimizers_are_told_from_others() -> None:
    seen = []

    def noting(shape, dtype=None):
        seen.append(is_in_optimizer())
        return keras.ops.zeros(shape, dtype)

    kernel = keras.Variable(noting, (2,))
    optimizer = keras.optimizers.SGD()
    optimizer.add_variable((2,), noting)
    optimizer.add_variable_from_reference(kernel, "slot", noting)
    assert seen == [False, True, True]
    assert not is_in_optimizer()


def test_slots_have_a_reference_in_optimizers_that_were_plain_before() -> None:
    seen = []

    class Momentum(keras.optimizers.SGD):
        """A kind of optimizer that nobody has made plain yet."""

        def add_variable_from_reference(self, variable, name=None, **options):
            def noting(shape, dtype=None):
                seen.append(slot_reference())
                return keras.ops.zeros(shape, dtype)

            return super().add_variable_from_reference(variable, name, noting)

    kernel = keras.Variable([1.0, 2.0])
    patching.uninstall()
    try:
        plain_optimizer(Momentum(momentum=0.5))
        patching.install("parameter servers")
        optimizer = Momentum(momentum=0.5)
        plain_optimizer(optimizer)
        optimizer.build([kernel])
    finally:
        patching.uninstall()
        hooks.install(StrategyHooks())
    assert [id(reference) for reference in seen] == [id(kernel)]


def test_a_sink_gets_all_gradients_of_several_optimizers(mirrored) -> None:
    kernels = [keras.Variable([1.0, 2.0]) for _ in range(2)]
    inner = [keras.optimizers.SGD(1.0), keras.optimizers.Adam(1.0)]
    optimizer = keras.optimizers.MultiOptimizer(
        lambda variable: inner[0] if variable is kernels[0] else inner[1]
    )
    optimizer.build(kernels)
    assert optimizers_of(optimizer) == inner
    assert optimizers_of(inner[0]) == []
    gradients = [keras.ops.ones(2), keras.ops.ones(2)]
    given = []
    with applying_through(lambda *arguments: given.append(arguments)):
        optimizer.apply(gradients, kernels)
    assert given == [(optimizer, gradients, kernels)]
    assert float(keras.ops.convert_to_numpy(kernels[0].value)[0]) == 1.0


def test_a_rate_is_that_of_the_inner_optimizer_and_none_of_a_schedule() -> None:
    optimizer = keras.optimizers.SGD(0.25)
    scaled = keras.optimizers.LossScaleOptimizer(optimizer)
    assert variable_rate(optimizer) == variable_rate(scaled) == 0.25
    scaled.learning_rate = 0.5
    assert variable_rate(scaled) == 0.5
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    assert variable_rate(keras.optimizers.SGD(schedule)) is None
    assert variable_rate(None) is None


def test_the_device_of_a_scope_outlasts_clear_session(mirrored) -> None:
    if keras.backend.backend() != "torch":
        pytest.skip("only Keras on Torch has its device in the state of a thread")
    # `meta`, as another device than the default one, which is the CPU here.
    with keras.device("meta"), kept_scope_state():
        keras.utils.clear_session()
        variable = keras.Variable([1.0])
    assert variable.value.device.type == "meta"
    assert keras.Variable([1.0]).value.device.type == "cpu"
