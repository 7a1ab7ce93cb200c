"""Distributed datasets inside of compiled functions are an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import keras_strategies as ks


# On Torch `ks.function` runs Python.
@pytest.mark.one_backend("jax", "tensorflow")
def test_a_dataset_is_iterated_outside_of_a_program(mirrored: Any) -> None:
    rows = np.arange(10, dtype="float32")
    dataset = mirrored.experimental_distribute_dataset([rows[:4], rows[4:8]])

    @ks.function
    def epoch() -> Any:
        return list(dataset)

    @ks.function
    def step(iterator: Any) -> Any:
        return next(iterator)

    for call in (epoch, lambda: step(iter(dataset))):
        with pytest.raises(
            RuntimeError, match="Iterate outside, and call the function"
        ):
            call()
