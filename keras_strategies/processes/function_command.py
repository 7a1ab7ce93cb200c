"""Command of a Python process that calls a function."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

# Not `-m`, because the path to a module may be in `sys.path` only.
_CODE = """\
import importlib, json, sys
call = json.loads(sys.argv[1])
sys.path[:] = call["path"]
module, function = call["entry"].split(":")
getattr(importlib.import_module(module), function)(**call["arguments"])
"""


def function_command(entry: str, arguments: Mapping[str, Any]) -> list[str]:
    """The command of a process that calls a function, with this process's `sys.path`.

    Args:
        entry: str, `"module:function"`.
        arguments: dict of its arguments, numbers, strings, lists and dicts.

    Returns:
        list of str.
    """
    path = [os.path.abspath(folder) for folder in sys.path]
    call = {"path": path, "entry": entry, "arguments": dict(arguments)}
    return [sys.executable, "-u", "-c", _CODE, json.dumps(call)]
