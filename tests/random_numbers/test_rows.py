"""Random numbers of rows are those of one device, for any number of replicas."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import keras
import pytest
from harness.training import as_arrays, assert_same

import keras_strategies as ks
from random_numbers.cases import BACKEND, BATCH, CASES, INPUTS, REFUSED, TARGETS, Case


def trained(case: Case, strategy: Any) -> Any:
    """Losses and weights of two epochs."""
    keras.utils.set_random_seed(11)
    x, y = INPUTS[case.rank], TARGETS
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = case.model()
        model.compile(keras.optimizers.SGD(0.05), "mse")
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return as_arrays((history.history["loss"], model.get_weights()))


#: One for each way in which numbers are drawn. On JAX, `fit` is one program for any
#: number of replicas; those of Keras are the same as partitioned ones but on Torch.
BY_DAY = {
    "jax": ["several-generator-partitioned-3"],
    "tensorflow": [
        "Dropout-no-seed-partitioned-3",
        "RandomFlip-partitioned-3",
        *(
            f"{name}-generator-partitioned-3"
            for name in ("uniform", "several", "python", "framework")
        ),
    ],
}
BY_DAY["torch"] = [
    *BY_DAY["tensorflow"],
    "Dropout-keras-3",
    *(f"{name}-generator-keras-3" for name in ("categorical", "gamma", "several")),
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end within the rows of a replica, and at their ends."""
    if BACKEND == "torch":
        from keras_strategies.engines.torch.random_numbers import block_draws

        monkeypatch.setattr(block_draws, "_CPU_BLOCK", 24)


@pytest.mark.nightly(unless=BY_DAY[BACKEND])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("random_numbers", ["partitioned", "keras"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_is_that_of_one_device(case, random_numbers, count, small_blocks):
    devices = [f"cpu:{i}" for i in range(count)]
    strategy = ks.MirroredStrategy(devices, random_numbers=random_numbers)
    if case.name in REFUSED.get(BACKEND, ()):
        for each in (None, strategy):
            with pytest.raises(TypeError, match="Abstract tracer value"):
                trained(case, each)
        return
    has_own = BACKEND == "torch" and random_numbers == "partitioned"
    expected = trained(case, ks.OneDeviceStrategy("cpu:0") if has_own else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained(case, strategy)
    assert_same(expected, found, 1e-5, case.name)
    texts = [str(each.message) for each in caught]
    unsplit = [text for text in texts if "cannot be split by rows" in text]
    # Where one row's numbers end, those of the next begin.
    counts = BACKEND == "torch" and random_numbers == "keras"
    by_others = counts and case.name.startswith("gamma-of-rows")
    assert bool(unsplit) == (by_others or not case.is_split), unsplit


def test_other_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="drawn in blocks of rows"):
        ks.MirroredStrategy(["cpu:0"], random_numbers="numpy")
