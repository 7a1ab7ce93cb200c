"""Values of shards that are parts of a file: copies, and which part it is."""

from __future__ import annotations

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("tests of the Torch backend", allow_module_level=True)

import torch

from keras_strategies.engines.torch.model_parallel.file_parts import (
    part_of_file,
)


def test_a_part_of_a_file_has_a_name_of_its_own(tmp_path) -> None:
    path = tmp_path / "values"
    np.arange(24, dtype="float32").tofile(path)

    def name(start: int, rows: int, *, transposed: bool = False) -> str | None:
        found = np.memmap(path, "float32", "c", 4 * start, (rows, 2)).view(np.ndarray)
        found = found.T if transposed else found
        return part_of_file(found, torch.from_numpy(found))

    first = name(0, 4)
    assert first is not None
    assert name(0, 4) == first
    others = {name(2, 4), name(0, 3), name(0, 4, transposed=True)}
    assert len(others - {first, None}) == 3
    path.write_bytes(bytes(100))
    assert name(0, 4) != first
    array = np.zeros((4, 2), "float32")
    assert part_of_file(array, torch.from_numpy(array)) is None
    # A copy is not the part.
    mapped = np.memmap(path, "float32", "c", 0, (4, 2))
    assert part_of_file(mapped, torch.from_numpy(mapped).clone()) is None
