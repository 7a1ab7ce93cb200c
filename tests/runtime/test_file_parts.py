"""Arrays that are parts of a file have a number of their own."""

from __future__ import annotations

import numpy as np
import pytest

from keras_strategies.communication.file_parts import file_part_number

pytestmark = pytest.mark.one_backend


def test_a_part_of_a_file_has_a_number_of_its_own(tmp_path) -> None:
    path = tmp_path / "values"
    values = np.zeros(24, "float32")
    values.tofile(path)

    def part(start: int, rows: int, dtype: str = "float32") -> np.ndarray:
        found = np.memmap(path, dtype, "c", 4 * start, (rows, 2))
        return found.view(np.ndarray)

    first = file_part_number(part(0, 4))
    assert first is not None
    assert file_part_number(part(0, 4)) == first
    entire = np.memmap(path, "float32", "c", 0, (12, 2))
    assert file_part_number(entire[:4]) == first
    changed = part(0, 4)
    changed[0, 1] = 1.0
    others = [part(2, 4), part(0, 3), part(0, 4).T, entire[4:8], part(0, 4, "int32")]
    numbers = {file_part_number(each) for each in (*others, changed)}
    assert len(numbers - {first, None}) == len(others) + 1
    values[-1] = 1
    values.tofile(path)
    assert file_part_number(part(0, 4)) != first


def test_other_arrays_have_none(tmp_path) -> None:
    path = tmp_path / "values"
    np.zeros(8, "float32").tofile(path)
    mapped = np.memmap(path, "float32", "c", 0, (4, 2))
    arrays = [np.zeros((4, 2)), np.zeros((4, 2))[1:], np.array(mapped), mapped + 1]
    assert [file_part_number(array) for array in arrays] == [None] * 4
    assert file_part_number(mapped) is not None
    path.unlink()
    assert file_part_number(mapped) is None
