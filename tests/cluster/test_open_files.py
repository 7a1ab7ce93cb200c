"""Engines get the open files that they need, or an error names the limit."""

from __future__ import annotations

import pytest
from lead.leads import lead_process

pytestmark = pytest.mark.one_backend

CODE = """
import os, resource
from keras_strategies.communication.open_files import reserve_files
files = [open(os.devnull) for _ in range(40)]
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))
while True:
    try:
        files.append(open(os.devnull))
    except OSError:
        break
reserve_files(4)
files.append(open(os.devnull))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def run(hard: str) -> str:
    found = lead_process(CODE.replace("most", hard))
    return found.stdout + found.stderr


def test_the_soft_limit_is_raised():
    assert int(run("hard")) >= 100 + 64 + 4 * 4


@pytest.mark.parametrize("hard", ["100", "110"])
def test_a_hard_limit_that_is_too_low_is_named(hard):
    text = run(hard)
    assert "WorkerError: This process has 100 files open and may open " + hard in text
    assert "connections with 4 workers need 20 more" in text
    assert "`ulimit -n" in text
