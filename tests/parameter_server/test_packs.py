"""Small variables that a server updates as one."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import optimizers

from keras_strategies import keras_compat
from keras_strategies.parameter_server.engines import get_engine
from keras_strategies.parameter_server.server.optimizer_updater import (
    OptimizerSpec,
    Updater,
)
from keras_strategies.parameter_server.server.variable_store import Store

SHAPES = [(3, 4), (4,), (4, 1), (), (200, 100)]
SMALL = range(4)

#: Which of the variables are in one pack.
PACKS = {
    "adagrad": (lambda: optimizers.Adagrad(0.5), [{0, 1, 2, 3}]),
    "adam": (lambda: optimizers.Adam(0.5), [{0, 1, 2, 3}]),
    "clipvalue": (lambda: optimizers.SGD(0.5, 0.9, clipvalue=0.1), [{0, 1, 2, 3}]),
    "lamb": (lambda: optimizers.Lamb(0.5), []),
    # Matrices are updated as such.
    "muon": (lambda: optimizers.Muon(0.5), [{1, 3}]),
    "ema": (lambda: optimizers.SGD(0.5, use_ema=True), []),
}


def updater(optimizer, decays=()) -> tuple[Updater, Store]:
    """An optimizer on a server, with variables of these shapes."""
    random = np.random.default_rng(0)
    values = [random.normal(size=shape) for shape in SHAPES]
    variables = [keras.Variable(value, dtype="float32") for value in values]
    slots: dict[int, list] = {id(variable): [] for variable in variables}
    before = optimizer.add_variable_from_reference

    def add(reference_variable, *args, **kwargs):
        slot = before(reference_variable, *args, **kwargs)
        slots[id(reference_variable)].append(slot)
        return slot

    optimizer.add_variable_from_reference = add
    optimizer.build(variables)
    del optimizer.add_variable_from_reference
    everything = [*variables, *optimizer.variables]
    number = {id(variable): i for i, variable in enumerate(everything)}
    own = {number[key]: tuple(number[id(s)] for s in ss) for key, ss in slots.items()}
    taken = {s for ss in own.values() for s in ss}
    store = Store()
    for variable in everything:
        value = keras.ops.convert_to_numpy(variable)
        store.create((number[id(variable)], 0), np.array(value))
    keras_compat.plain_optimizer(optimizer)
    keras_compat.renew_identities([optimizer])
    spec = OptimizerSpec(
        number=0,
        optimizer=optimizer,
        templates={number[id(variable)]: variable for variable in everything},
        scalars=tuple(
            number[id(v)] for v in optimizer.variables if number[id(v)] not in taken
        ),
        slots=own,
        decays={i: i in decays for i in range(len(variables))},
        constraints={},
        exact_rows=True,
    )
    return Updater(spec, store, get_engine()), store


def gradients():
    random = np.random.default_rng(1)
    return [((i, 0), random.normal(size=s).astype("f")) for i, s in enumerate(SHAPES)]


def packs(made, store):
    if not made._is_plain:
        return []
    found, rest = made._packs.split(store, gradients())
    assert len(rest) + sum(map(len, found)) == len(SHAPES)
    return [{key[0] for key, _ in pack} for pack in found]


@pytest.mark.parametrize("name", PACKS)
def test_numbers_that_are_updated_alone_are_updated_together(name) -> None:
    make, expected = PACKS[name]
    made, store = updater(make())
    alone, other = updater(make())
    alone._is_plain = False
    assert packs(made, store) == expected
    for _ in range(3):
        made.apply(gradients(), [])
        alone.apply(gradients(), [])
    assert store.arrays.keys() == other.arrays.keys()
    for key, array in store.arrays.items():
        assert array.shape == other.arrays[key].shape
        np.testing.assert_allclose(array, other.arrays[key], rtol=1e-5, atol=1e-6)


def test_what_decays_is_not_put_with_what_does_not() -> None:
    made, store = updater(optimizers.AdamW(0.5, weight_decay=1e-6), decays={0, 2})
    assert packs(made, store) == [{0, 2}, {1, 3}]


def test_a_part_that_is_written_to_is_a_part_of_its_own() -> None:
    made, store = updater(optimizers.SGD(0.5))
    made.apply(gradients(), [])
    before = [np.array(store.get((i, 0))) for i in SMALL]
    store.write((1, 0), np.full(2, 7.0, "f"), 1)
    assert store.get((1, 0))[1:3].tolist() == [7.0, 7.0]
    for i in (0, 2, 3):
        np.testing.assert_array_equal(store.get((i, 0)), before[i])
