"""Processes that are killed, started as forks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import backend_tables
from harness.forker import Forker

#: What runs on every backend (see `backend_tables`): the rest is the same on all.
EVERYWHERE = {
    "test_input": (
        "test_input_continues_where_it_was[arrays in short epochs]",
        "test_input_continues_where_it_was[tf.data]",
        "test_input_continues_where_it_was[tf.data in short epochs]",
        "test_input_of_unknown_length",
        "test_several_steps_in_one_execution",
        "test_an_order_without_a_seed_is_a_warning",
    ),
    "test_snapshots": (
        "test_a_finished_training_has_nothing_to_do",
        "test_a_loss_scale_is_resumed",
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    backend_tables.mark_nightly(items, Path(__file__).parent, EVERYWHERE)


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Starts scripts in processes that have imported Keras already."""
    with Forker() as forker:
        yield forker
