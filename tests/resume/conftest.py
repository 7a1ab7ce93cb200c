"""Processes that are killed, started as forks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from harness.forker import Forker


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Starts scripts in processes that have imported Keras already."""
    with Forker() as forker:
        yield forker
