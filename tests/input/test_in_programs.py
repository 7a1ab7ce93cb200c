"""Distributed datasets inside of compiled functions are an error."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import keras_strategies as ks


@pytest.mark.one_backend("jax", "tensorflow")
def test_a_dataset_is_iterated_outside_of_a_program(mirrored: Any) -> None:
    if keras.backend.backend() == "torch":
        pytest.skip("`ks.function` runs Python there")
    rows = np.arange(10, dtype="float32")
    dataset = mirrored.experimental_distribute_dataset([rows[:4], rows[4:8]])

    @ks.function
    def epoch() -> Any:
        return list(dataset)

    @ks.function
    def step(iterator: Any) -> Any:
        return next(iterator)

    text = "Iterate outside, and call the function"
    for call in (epoch, lambda: step(iter(dataset))):
        with pytest.raises(RuntimeError, match=text):
            call()
