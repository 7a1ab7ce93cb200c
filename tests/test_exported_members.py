"""The public face: complete, sorted, documented."""

from __future__ import annotations

import inspect
import types

import pytest

import keras_strategies as ks
from keras_strategies import api

# What is there before Keras is imported, and the room that is not in `api`.
WITHOUT_KERAS = {"cluster_resolver", "errors", "launch"}
MODULES = {"experimental"}


def test_all_is_sorted_and_complete() -> None:
    public = {
        name
        for name, value in vars(api).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert sorted(ks.__all__) == ks.__all__
    assert sorted(api.__all__) == api.__all__
    assert set(api.__all__) == public
    assert set(ks.__all__) == public | WITHOUT_KERAS | MODULES


def test_every_name_is_there_and_listed() -> None:
    assert set(ks.__all__) <= set(dir(ks))
    for name in api.__all__:
        assert getattr(ks, name) is getattr(api, name)
    with pytest.raises(AttributeError, match="no attribute 'MirroredStrategie'"):
        ks.MirroredStrategie  # noqa: B018


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
