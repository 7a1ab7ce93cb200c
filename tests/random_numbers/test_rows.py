"""Random numbers of rows are those of one device, for any number of replicas."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import pytest
from harness.training import as_arrays, assert_same

import keras_strategies as ks
from random_numbers.cases import (
    BACKEND,
    BATCH,
    CASES,
    INPUTS,
    TARGETS,
    Case,
    image_layers,
    more_image_layers,
)


def trained(case: Case, strategy: Any) -> Any:
    """Losses and weights of two epochs."""
    keras.utils.set_random_seed(11)
    x, y = INPUTS[case.rank], TARGETS
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = case.model()
        model.compile(keras.optimizers.SGD(0.05), "mse")
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return as_arrays((history.history["loss"], model.get_weights()))


#: Their draws have the shapes of the layers that are tested by day.
NIGHTLY = (
    *more_image_layers(),
    *(name for name in image_layers() if name not in ("RandomFlip", "RandomErasing")),
    *("GRU", "Bidirectional", "AlphaDropout", "GaussianDropout", "SpatialDropout2D"),
)
#: On JAX, `fit` is one program for any number of replicas.
BY_DAY = ("Dropout", "several-generator") if BACKEND == "jax" else ()


def marked(case: Case) -> Any:
    is_by_day = not BY_DAY or case.name in BY_DAY
    is_by_day = is_by_day and case.name not in NIGHTLY
    marks = [] if is_by_day else [pytest.mark.nightly]
    return pytest.param(case, id=case.name, marks=marks)


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("case", map(marked, CASES))
def test_training_is_that_of_one_device(case: Case, count: int) -> None:
    strategy = ks.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    expected = trained(case, None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(case, strategy)
    assert_same(expected, found, 1e-5, case.name)
    texts = [str(each.message) for each in caught]
    unsplit = [text for text in texts if "cannot be split by rows" in text]
    assert bool(unsplit) == (not case.splits), unsplit
