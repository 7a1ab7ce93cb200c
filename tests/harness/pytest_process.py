"""pytest in a process that was forked from one with all imports done."""

from __future__ import annotations

import os
import sys

import pytest

from harness.forker import keep_fork

if __name__ == "__main__":
    # A session of its own, so that whoever started it can end its processes, too.
    os.setsid()
    keep_fork()
    sys.exit(pytest.main(sys.argv[1:]))
