"""Examples and notebooks in the process of a test, on few rows of their data."""

from __future__ import annotations

from typing import Any

import pytest

import keras_strategies as ks


def use_few_digits(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Gives scripts that train on scikit-learn's digits their first rows only.

    They may set the number of virtual devices, which is that of the tests already.
    """
    import sklearn.datasets

    load_all = sklearn.datasets.load_digits

    def load_few(**options: Any) -> tuple[Any, Any]:
        images, labels = load_all(**options)
        return images[:rows], labels[:rows]

    monkeypatch.setattr(sklearn.datasets, "load_digits", load_few)
    monkeypatch.setattr(ks, "set_virtual_cpu_devices", lambda count: None)
