"""N replicas compute what one device computes on the same global batch.

Each case is trained by Keras alone on one device (`harness.references`) and under
strategies, and everything that a person can see is compared: histories, weights,
optimizer variables, `evaluate`, `predict`. Most have a last batch that is not a whole
one.

Every case of `exactness.cases` is trained on two mirrored replicas. A further strategy
is tested with the cases that reach code of its own: `PATHS` says which, and what that
code is. The nightly run trains the rest of the cross product, and the cases of
`exactness.single_cases`, one for each loss, metric, optimizer, form of data and option.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
from exactness import cases, single_cases
from harness import data, models
from harness.strategies import STRATEGIES
from harness.training import (
    Case,
    Results,
    assert_same,
    assert_same_training,
    differences,
    state_of,
)
from keras import optimizers

# What is called unsplit is exact, and would hide mistakes in how it is split.
pytestmark = pytest.mark.filterwarnings("error:.*cannot be split by rows")
CASES = [*cases.CASES, *single_cases.CASES]

# For each strategy but two mirrored replicas: case, and the code that it is there for.
PATHS: dict[str, dict[str, str]] = {
    "one_device": {
        "conv_bn": "fit, evaluate and predict handed on to Keras",
        "on_batch": "train_on_batch and its siblings handed on to Keras",
    },
    "mirrored_4": {
        "sizes": "uneven parts and replicas without rows; metrics and batch norm",
        "mixed_float16_skips": "a step that is skipped for some replicas' gradients",
    },
    "central": {
        "conv_bn": "state of layers on the storage device",
        "adamw_schedule": "slots and learning rate on the storage device",
        "global_clipnorm_accumulation_ema": "gradients moved, clipped, added up and "
        "averaged on the storage device",
        "mixed_float16_skips": "loss scale on the storage device",
        "steps_per_execution_bn_weights": "several updates on the "
        "storage device in a program",
        "on_batch": "an update on the storage device without the loop of fit",
    },
}
if "default_options" in STRATEGIES:
    PATHS["default_options"] = {
        "conv_bn": "all accelerators of the machine, found by the strategy",
    }

# Cases of two mirrored replicas that `make test` trains on every backend, because they
# reach most of what each has of its own; of the others it trains each on one.
EVERYWHERE = ("conv_bn", "int8", "jit_compile", "no_jit_compile", "size_3")


def _parameters() -> Iterator[Any]:
    for case in CASES:
        for name in STRATEGIES:
            if not name.startswith(("one", "mir", "cen", "def")):
                continue
            is_named = name == "mirrored_2" or case.name in PATHS[name]
            if case.nightly or not is_named:
                marks = [pytest.mark.nightly]
            else:
                is_everywhere = name == "mirrored_2" and case.name in EVERYWHERE
                marks = [] if is_everywhere else [pytest.mark.one_backend]
            yield pytest.param(case, name, marks=marks, id=f"{case.name}-{name}")


@pytest.mark.slow(seconds=90)
@pytest.mark.parametrize("case, strategy_name", list(_parameters()))
def test_same_as_one_device(case: Case, strategy_name: str) -> None:
    assert_same_training(case, STRATEGIES[strategy_name].make())


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "strategy_name",
    ["mirrored_2", pytest.param("mirrored_4", marks=pytest.mark.nightly)],
)
def test_moving_averages_of_weights_survive_what_follows(strategy_name) -> None:
    """With EMA one goes on after `evaluate` as without it (see `fit_then_state`)."""
    found = []
    for name in ("one_device", strategy_name):
        keras.utils.set_random_seed(7)
        with STRATEGIES[name].make().scope():
            model = models.dense()
            averaging = optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)
            model.compile(averaging, "sparse_categorical_crossentropy")
        rows = data.classes(22)
        for _ in range(2):
            model.fit(rows.x, rows.y, batch_size=8, shuffle=False, verbose=0)
            model.evaluate(rows.x, rows.y, verbose=0)
        found.append(state_of(model))
    assert_same(found[0], found[1], 1e-5, strategy_name)


def _dropout(strategy: Any, seed: int) -> Results:
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(seed)
        model = models.dropout()
        model.compile("sgd", "sparse_categorical_crossentropy")
    # The initial weights are the same whatever the seed; the masks are not.
    model.set_weights([np.full(w.shape, 0.1, "float32") for w in model.weights])
    rows = data.classes(22)
    model.fit(rows.x, rows.y, batch_size=8, shuffle=False, verbose=0)
    return state_of(model)["weights"]


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["mirrored_2"])
@pytest.mark.parametrize(
    "strategy_name", ["mirrored_2", "one_device", "mirrored_4", "central"]
)
def test_dropout_is_that_of_one_device(strategy_name) -> None:
    strategy = STRATEGIES[strategy_name].make()
    found = _dropout(strategy, seed=1)
    assert_same(_dropout(None, seed=1), found, 1e-6, strategy_name)
    assert list(differences(found, _dropout(strategy, seed=2), 1e-3))


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.one_backend
def test_paths_name_cases_that_make_test_trains() -> None:
    trained = {case.name for case in cases.CASES if not case.nightly}
    for strategy, paths in PATHS.items():
        assert strategy in STRATEGIES
        assert paths.keys() <= trained, strategy
