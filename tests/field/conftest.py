"""The terminal summary of the field suite is its table."""

from __future__ import annotations

import keras
import pytest

from field import compare, table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    backend = keras.backend.backend()
    rows = table.read(compare.results_folder())
    own = [row for row in rows if row["backend"] == backend]
    if own:
        terminalreporter.section("field suite: two replicas and one device")
        terminalreporter.write_line(table.text(own))
