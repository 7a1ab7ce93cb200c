"""Models of keras-hub train on two replicas as on one device, with default options."""

from __future__ import annotations

import pytest

pytest.importorskip("keras_hub", reason="keras_hub is not installed")

from field import models
from field.compare import FieldCase, assert_trains_as_one_device


@pytest.mark.nightly
@pytest.mark.parametrize("case", models.CASES, ids=lambda case: case.name)
def test_model_of_keras_hub(case: FieldCase) -> None:
    assert_trains_as_one_device(case)
