"""The public face: complete, sorted, documented."""

from __future__ import annotations

import inspect
import types

import pytest

import keras_strategies as ks


def test_all_is_sorted_and_complete() -> None:
    public = {
        name
        for name, value in vars(ks).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    modules = {"cluster_resolver", "errors", "experimental"}
    assert sorted(ks.__all__) == ks.__all__
    assert set(ks.__all__) == public | modules


@pytest.mark.parametrize("name", ks.__all__)
def test_member_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(ks, name))


def test_experimental_names_are_those_of_the_face() -> None:
    for name in ks.experimental.__all__:
        assert hasattr(ks.experimental, name)
    assert ks.experimental.CentralStorageStrategy is ks.CentralStorageStrategy


def test_error_tree_keeps_the_builtin_types() -> None:
    for value in vars(ks.errors).values():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, ks.errors.KerasStrategiesError)
    assert issubclass(ks.errors.UnknownDeviceError, ValueError)
    assert issubclass(ks.errors.MixedStrategyError, RuntimeError)
