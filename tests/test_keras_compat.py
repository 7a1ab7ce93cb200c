"""What is relied on in Keras is there, and is put back."""

from __future__ import annotations

import keras
from keras.src.layers.layer import Layer
from keras.src.models.model import Trainer as BackendTrainer

from keras_strategies import keras_compat
from keras_strategies.keras_compat import patching
from keras_strategies.training.hooks import StrategyHooks


def test_hooks_are_installed_once_and_taken_out_again(mirrored) -> None:
    assert keras_compat.is_installed()
    hooked = Layer.__call__
    assert hooked.__wrapped__ is not None
    originals = list(patching.installed)
    names = {(owner.__name__, name) for owner, name, _ in originals}
    trainer = patching.base_trainer().__name__
    assert {(trainer, "__init__"), ("Layer", "__call__")} <= names
    for owner, name, original in originals:
        assert owner.__dict__[name] is not original
    keras_compat.uninstall()
    try:
        for owner, name, original in originals:
            assert owner.__dict__[name] is original
    finally:
        keras_compat.install(StrategyHooks())


def test_seed_states_have_the_name_that_offsets_go_by() -> None:
    generator = keras.random.SeedGenerator(1)
    assert keras_compat.seed_offset(generator.state, 0) == 0
    assert keras_compat.seed_offset(generator.state, 1) > 1000
    offsets = {keras_compat.seed_offset(generator.state, i) for i in range(64)}
    assert len(offsets) == 64
    assert keras_compat.seed_offset(keras.Variable(1.0, name="v"), 3) == 0


def test_a_step_is_built_from_shapes_alone() -> None:
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    assert not keras_compat.is_built(model)
    batch = (keras.KerasTensor((None, 3)), keras.KerasTensor((None, 2)))
    keras_compat.symbolic_build(model, batch)
    assert keras_compat.is_built(model)
    assert model.optimizer.built


def test_thread_state_is_copied_and_put_back() -> None:
    with keras.StatelessScope():
        state = keras_compat.thread_state()
        assert state["stateless_scope"] is not None
    with keras_compat.with_thread_state(state):
        assert keras_compat.current_stateless_scope() is state["stateless_scope"]
    assert keras_compat.current_stateless_scope() is None


def test_methods_that_are_wrapped_exist_where_they_are_looked_for() -> None:
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch"):
        assert name in BackendTrainer.__dict__
    assert "compile" in patching.base_trainer().__dict__


def test_variables_of_optimizers_are_told_from_others() -> None:
    seen = []

    def noting(shape, dtype=None):
        seen.append(keras_compat.is_in_optimizer())
        return keras.ops.zeros(shape, dtype)

    kernel = keras.Variable(noting, (2,))
    optimizer = keras.optimizers.SGD()
    optimizer.add_variable((2,), noting)
    optimizer.add_variable_from_reference(kernel, "slot", noting)
    assert seen == [False, True, True]
    assert not keras_compat.is_in_optimizer()
