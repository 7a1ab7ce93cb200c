"""`keras-strategies explain`: entries of the troubleshooting page in a terminal."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import keras_strategies as ks
from keras_strategies.tools.cli import main
from keras_strategies.tools.explain import explain

pytestmark = pytest.mark.one_backend("jax")

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def titles() -> list[str]:
    lines = PAGE.read_text("utf-8").splitlines()
    found = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    return [title.strip("`") if title.startswith("`") else title for title in found]


@pytest.mark.parametrize("title", titles())
def test_entries_are_text_for_a_terminal(title) -> None:
    text = explain(title)
    assert len(text.splitlines()) > 2
    for markdown in ("](", "|---", "```", "\n| ", "\n#"):
        assert markdown not in text


def test_a_table_is_printed_by_rows(capsys) -> None:
    assert main(["explain", "batcherror"]) == 0
    text = capsys.readouterr().out
    assert "Batches are split by rows, but\n    cause: The input yields sc" in text
    assert "    cure: Batch it: `dataset.batch(batch_size)`." in text


def test_without_a_name_all_entries_are_listed(capsys) -> None:
    assert main(["explain"]) == 0
    _, *found = capsys.readouterr().out.splitlines()
    assert found == titles()


@pytest.mark.parametrize(
    ("typed", "title"),
    [
        ("ks.errors.BatchError", "BatchError"),
        ("keras_strategies.errors.workererror", "WorkerError"),
        ("hang", "A hang"),
        ("it hangs", "A hang"),
        ("two devices", "Two devices are slower than one"),
        ("slow", "Two devices are slower than one"),
        ("out of memory", "Out of memory"),
        ("ResourceExhaustedError", "Out of memory"),
        ("No module named 'tensorflow'", "No module named 'tensorflow'"),
        (
            "ValueError: devices names cpu:7, which does not exist here. Use cpu:0.",
            "UnknownDeviceError",
        ),
        (
            "This process is in another JAX cluster, with 2 processes",
            "BackendInUseError",
        ),
    ],
)
def test_what_a_person_types_is_found(typed, title) -> None:
    assert explain(typed).splitlines()[0] == title


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BatchErr0r", "No entries have the name 'BatchErr0r'. Use BatchError"),
        ("qqq", "No entries have the name 'qqq'. Use an entry of `keras-strat"),
        ("warning", "7 entries have the name 'warning'. Use \"Warning: a layer"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_closest_ones(
    name, message, capsys
) -> None:
    with pytest.raises(ks.errors.InvalidArgumentError) as caught:
        explain(name)
    assert str(caught.value).startswith(message)
    assert main(["explain", name]) == 2
    error = capsys.readouterr().err
    assert message in error and "See `keras-strategies explain" not in error


def test_a_reader_that_takes_the_first_line_only_sees_no_traceback() -> None:
    command = [sys.executable, "-u", "-m", "keras_strategies", "explain", "BatchError"]
    ended = subprocess.run(
        f"{shlex.join(command)} | head -1", shell=True, capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr) == ("BatchError\n", "")
