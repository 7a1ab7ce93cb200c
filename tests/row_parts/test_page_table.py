"""The page of split calls has the tested losses and metrics."""

from __future__ import annotations

import keras
import pytest

if keras.backend.backend() == "jax":
    pytest.skip("JAX has no row parts", allow_module_level=True)

from row_parts.functions import METRICS
from row_parts.page_table import LISTED_LOSSES, PAGE, table, with_table


def test_the_page_has_the_table_of_losses_and_metrics() -> None:
    text = PAGE.read_text()
    assert table() in text, "Run `PYTHONPATH=tests python -m row_parts.page_table`."
    assert with_table(text) == text
    # With the header and CTC, which has a test of its own.
    assert len(table().splitlines()) == 2 + len(LISTED_LOSSES) + 1 + len(METRICS)
