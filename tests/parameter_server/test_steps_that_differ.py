"""Optimizers that do not do the same in every step, against one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from parameter_server import clusters

pytestmark = pytest.mark.multiprocess

SGD, Adam, Nadam = keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.Nadam
OPTIMIZERS = {
    "accumulation": lambda: SGD(0.05, momentum=0.9, gradient_accumulation_steps=3),
    "accumulation_and_decay": lambda: Adam(
        0.01, weight_decay=0.1, clipvalue=0.2, gradient_accumulation_steps=2
    ),
    # It has a variable of its own that every update changes.
    "accumulation_with_a_scalar": lambda: Nadam(0.01, gradient_accumulation_steps=2),
    "average": lambda: SGD(0.05, use_ema=True, ema_momentum=0.5),
    "average_that_overwrites": lambda: SGD(
        0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=5
    ),
    "accumulation_and_average": lambda: SGD(
        0.05, use_ema=True, ema_momentum=0.5, gradient_accumulation_steps=2
    ),
}


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["average"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_equal_one_device_without_staleness(synchronous, name) -> None:
    x, y = clusters.clicks(88)  # The last of 11 steps accumulates.
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    expected = clusters.two_inputs(OPTIMIZERS[name]())
    expected.fit(x, y, epochs=1, **options)
    with synchronous.scope():
        model = clusters.two_inputs(OPTIMIZERS[name]())
    model.fit(x, y, epochs=1, **options)
    for found, wanted in (
        (model.weights, expected.weights),
        (model.optimizer.variables, expected.optimizer.variables),
    ):
        pairs = zip(clusters.values(found), clusters.values(wanted), strict=True)
        for variable, (ours, theirs) in zip(found, pairs, strict=True):
            np.testing.assert_allclose(
                ours, theirs, rtol=1e-4, atol=1e-5, err_msg=variable.path
            )
