"""Reports of a cluster's start: lines on stderr, or a logger."""

from __future__ import annotations

import logging

import pytest

from parameter_server import clusters

pytestmark = pytest.mark.one_backend


def start() -> None:
    """Reports of a cluster of two workers and one server."""
    supervisor = clusters.RecordedSupervisor(2, 1)
    supervisor.start_all()
    supervisor.handle("server", b"s", (0, 0, 60, False, "", "ipc://s"))
    supervisor.handle("worker", b"w", (1, 0, 51, "cpu:0"))


EXPECTED = [
    "starting 2 workers and 1 parameter server",
    "parameter server 0 is ready, 1 of 1",
    "worker 1 is ready, 1 of 2",
]


def test_each_process_is_a_line_on_stderr(capsys) -> None:
    start()
    found = capsys.readouterr()
    assert not found.out
    for line, text in zip(found.err.splitlines(), EXPECTED, strict=True):
        assert line.startswith(f"keras_strategies: {text} (") and line.endswith(" s)")


def test_a_logger_takes_the_lines(capsys, caplog) -> None:
    with caplog.at_level(logging.INFO, logger="keras_strategies"):
        start()
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == EXPECTED
    assert not capsys.readouterr().err
