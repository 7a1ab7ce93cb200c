"""Recipes of many kinds train on two replicas as on one device, by default options."""

from __future__ import annotations

import pytest

from field import recipes
from field.compare import FieldCase, assert_trains_as_one_device


@pytest.mark.one_backend("jax")
@pytest.mark.nightly(unless=["diffusion"])
@pytest.mark.parametrize("case", recipes.CASES, ids=lambda case: case.name)
def test_recipe(case: FieldCase) -> None:
    assert_trains_as_one_device(case)
