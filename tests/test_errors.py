"""The last line of an error: the address of its entry in the troubleshooting page."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import cloudpickle
import pytest

import keras_strategies as ks
from keras_strategies.processes.portable_exceptions import portable_exception

ROOT = Path(__file__).parents[1]
CLASSES = [value for value in vars(ks.errors).values() if isinstance(value, type)]


def address_of(error: BaseException) -> str:
    last = str(error).splitlines()[-1]
    assert last.startswith("See "), last
    return last.removeprefix("See ")


def test_addresses_are_those_of_the_page() -> None:
    page = ROOT / ks.errors.TROUBLESHOOTING
    # MkDocs and code hosts make the anchor of a heading of one word from its letters.
    anchors = [
        heading.lower()
        for heading in re.findall(r"^#+ (\w+)$", page.read_text(), re.M)
        if heading.endswith(("Error", "WorkersChanged"))
    ]
    found = [address_of(cls("something")) for cls in CLASSES]
    assert sorted(found) == sorted(f"{ks.errors.TROUBLESHOOTING}#{a}" for a in anchors)


def test_the_address_follows_the_message() -> None:
    error = ks.errors.BatchError("No rows.")
    assert str(error) == "No rows.\nSee docs/troubleshooting.md#batcherror"
    assert error.text == "No rows."
    assert error.args == ("No rows.",)


@pytest.mark.parametrize("pickler", [pickle, cloudpickle])
def test_an_error_of_another_process_has_one_address(pickler) -> None:
    error = ks.errors.BatchError("No rows.")
    for _ in range(2):
        error = pickler.loads(pickler.dumps(error))
    assert str(error) == str(ks.errors.BatchError("No rows."))
    assert str(portable_exception(error, "on worker 1")) == str(error)


def test_a_quoted_error_gives_its_address_to_the_one_that_quotes_it() -> None:
    cause = ks.errors.BatchError("No rows.")
    error = ks.errors.ClosureCancelledError(f"An earlier one failed: {cause}.")
    again = ks.errors.PeerError(f"PeerError: {error}")
    for quoting in (error, again):
        assert str(quoting).count("See ") == 1
        assert address_of(quoting) == "docs/troubleshooting.md#batcherror"
    assert error.text == "An earlier one failed: No rows.."


def test_an_error_defined_elsewhere_has_the_entry_of_its_base() -> None:
    class OwnError(ks.errors.LayoutError):
        pass

    assert address_of(OwnError("")) == "docs/troubleshooting.md#layouterror"
