"""pytest in a process that was forked from one with all imports done."""

from __future__ import annotations

import os
import sys

import pytest

if __name__ == "__main__":
    # A session of its own, so that whoever started it can end its processes, too.
    os.setsid()
    sys.exit(pytest.main(sys.argv[1:]))
