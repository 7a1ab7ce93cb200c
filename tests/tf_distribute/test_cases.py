"""Every case has the outcome of `tf.distribute`, or a row in the page on migration."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

from tf_distribute.compare import are_equal, differences, outcomes_of

pytestmark = pytest.mark.one_backend

PAGE = Path(__file__).parents[2] / "docs" / "migrating-from-tf-distribute.md"


def patterns() -> list[str]:
    """The patterns of the page's table of measured differences."""
    _, _, section = PAGE.read_text().partition("## Measured differences\n")
    section, _, _ = section.partition("\n## ")
    found = []
    for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
        found += re.findall(r"`(.*?)`", row)
    return found


def test_cases_that_differ_are_on_the_page() -> None:
    different = differences(outcomes_of("ours"))
    listed = patterns()
    missing = {
        name: outcomes
        for name, outcomes in different.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in listed)
    }
    assert not missing
    unused = [pattern for pattern in listed if not fnmatch.filter(different, pattern)]
    assert not unused


def test_outcomes_are_compared() -> None:
    one = {"value": [1.0, {"replicas": [2, None]}]}
    assert are_equal(one, {"value": [1, {"replicas": [2.0, None]}]})
    assert not are_equal(one, {"value": [1, {"replicas": [3, None]}]})
    assert not are_equal(one, {"value": [1, [2, None]]})
    error = {"error": "ValueError", "message": ""}
    assert are_equal(error, {"error": "ContextError", "message": "another"})
    assert not are_equal(one, error)
