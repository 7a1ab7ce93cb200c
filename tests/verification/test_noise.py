"""`ks.verify` measures the noise of one device for as many steps as are needed."""

from __future__ import annotations

import pytest
from verification.planted_in_fit import data, dense

import keras_strategies as ks
from keras_strategies.verification.trainings import Script
from keras_strategies.verification.verify import _Verification

pytestmark = pytest.mark.one_backend

STEPS, LOSS = 3, ("loss", 0)


@pytest.fixture
def verification() -> _Verification:
    script = Script(dense, data, None, STEPS, seed=0)
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    made = _Verification(script, strategy, tolerance=1e-12)
    made.alone_steps = made.alone.train(STEPS)
    return made


def noise_of(verification: _Verification, *losses: float) -> list[float]:
    """Noise of the loss after each step that is taken, for differences of the loss."""
    before = sum(each.steps_taken for each in verification.experiments)
    noise = verification._noise([{LOSS: each} for each in losses])
    taken = sum(each.steps_taken for each in verification.experiments) - before
    assert taken == len(noise)
    return [each[LOSS] for each in noise]


def test_nothing_that_differs_needs_no_noise(verification) -> None:
    assert noise_of(verification, 0.0, 1e-12, 0.0) == []
    assert not verification.experiments  # Not built either.


def test_noise_is_measured_up_to_the_step_that_differs(verification) -> None:
    assert len(noise_of(verification, 1.0, 1.0, 1.0)) == 1
    assert len(noise_of(verification, 0.0, 1.0, 1.0)) == 2
    assert len(noise_of(verification, 0.0, 0.0, 1.0)) == STEPS


def test_noise_is_measured_until_it_explains_all_later_differences(
    verification,
) -> None:
    [noise] = noise_of(verification, 1.0, 0.0, 0.0)
    assert 0 < noise < 1e-5
    assert noise_of(verification, 5 * noise, 0.0, 5 * noise) == [noise]
    assert noise_of(verification, 0.0, 0.0, 5 * noise) == [noise]
    assert len(noise_of(verification, 0.0, 0.0, 20 * noise)) > 1
