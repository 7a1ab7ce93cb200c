"""The tests in a folder with the name of a backend are skipped on the others."""

from __future__ import annotations

import importlib.util

import keras
import pytest
from harness.marks import BACKENDS

#: Files that need their framework, but not as the backend of Keras.
ANYWHERE = ("test_jax_waits", "test_tensorflow_partitioners", "test_torch_losses")


class OfAnotherBackend(pytest.Module):
    """A file of tests that is not imported."""

    def collect(self):
        pytest.skip(f"tests of the {self.path.parent.name} backend")


def pytest_pycollect_makemodule(module_path, parent):
    name = module_path.parent.name
    if name not in BACKENDS or name == keras.backend.backend():
        return None
    if module_path.stem in ANYWHERE and importlib.util.find_spec(name):
        return None
    return OfAnotherBackend.from_parent(parent, path=module_path)
