"""pytest in a process that was forked from one with all imports done."""

from __future__ import annotations

import os
import sys

import pytest

if __name__ == "__main__":
    code = pytest.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Reports are written. The interpreter would free all modules one by one, and copy
    # their memory, which it shares with the process that forked it.
    os._exit(int(code))
