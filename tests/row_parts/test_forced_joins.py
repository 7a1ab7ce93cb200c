"""Training is the same where every output is joined, as for code with all rows."""

from __future__ import annotations

from typing import Any

import keras
import pytest

if keras.backend.backend() == "jax":
    pytest.skip("JAX has no row parts", allow_module_level=True)

from exactness import cases
from harness.strategies import STRATEGIES
from harness.training import Case, assert_same_training

from keras_strategies.runtime.data_parallel.data_parallel_call import DataParallelCall

#: These are trained by day.
BY_DAY = {"losses", "masked_tagger"}


def _parameters() -> list[Any]:
    return [
        pytest.param(
            case,
            id=case.name,
            marks=() if case.name in BY_DAY else pytest.mark.nightly,
        )
        for case in cases.CASES
    ]


@pytest.mark.one_backend("torch", "tensorflow")
@pytest.mark.nightly(unless=["masked_tagger"])
@pytest.mark.parametrize("case", _parameters())
def test_same_as_one_device(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def joined(self: Any, layer: Any, *args: Any, **kwargs: Any) -> tuple[bool, Any]:
        asked.append(layer)
        return False, None

    monkeypatch.setattr(DataParallelCall, "on_row_parts", joined)
    monkeypatch.setattr(DataParallelCall, "_split_of_parts", lambda self, call: None)
    assert_same_training(case, STRATEGIES["mirrored_2"].make())
    assert asked or case.name not in BY_DAY
