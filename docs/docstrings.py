"""Docstring examples as code blocks, for mkdocstrings.

The docstrings of this package end with `Example:` and unindented lines of the
interpreter. Griffe's parser expects indented ones, and Markdown reads `>>>` as a quote.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
# Lines of the interpreter and what they print, up to an empty line.
_SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class DocstringExamples(griffe.Extension):
    """Fences the examples of each docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = _EXAMPLE.sub("**Example**", obj.docstring.value)
        obj.docstring.value = _SESSION.sub(r"```pycon\n\g<0>\n```", text)
