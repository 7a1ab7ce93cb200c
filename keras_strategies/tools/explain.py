"""The command `keras-strategies explain`: an entry of the troubleshooting page."""

from __future__ import annotations

import difflib
import re
import textwrap
from pathlib import Path

from keras_strategies.errors import InvalidArgumentError

_WIDTH = 88
_TITLE = re.compile(r"^### (.+)$", re.M)
_LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
_CODE = re.compile(r"(`+)(.+)\1")
_COLUMN = re.compile(r"(?<!\\)\|")


def explain(name: str | None = None) -> str:
    """Returns the causes of an error and what to do, as text for a terminal.

    Args:
        name: str, the name of an error class, or the title of another entry, in upper
            or lower case; the start of a title is enough. None for the list of all.

    Raises:
        InvalidArgumentError: no entry, or more than one, has this name.
    """
    entries = _entries()
    if name is None:
        return "\n".join(["keras-strategies explain NAME, one of:", *entries])
    title = _title(name, list(entries))
    return f"{title}\n{'-' * _WIDTH}\n{entries[title]}"


def _page() -> str:
    """The text of the page, which the wheel contains beside this module."""
    here = Path(__file__)
    installed = here.with_name("troubleshooting.md")
    source = here.parents[2] / "docs" / "troubleshooting.md"
    return (installed if installed.exists() else source).read_text("utf-8")


def _entries() -> dict[str, str]:
    _, *parts = _TITLE.split(_page())
    titles, texts = parts[::2], parts[1::2]
    return {
        _plain(title): _rendered(re.split(r"^## ", text, flags=re.M)[0])
        for title, text in zip(titles, texts, strict=True)
    }


def _title(name: str, titles: list[str]) -> str:
    lower = {title.lower(): title for title in titles}
    if name.lower() in lower:
        return lower[name.lower()]
    found = [title for key, title in lower.items() if key.startswith(name.lower())]
    if len(found) == 1:
        return found[0]
    close = found or difflib.get_close_matches(name, titles, n=3, cutoff=0.4)
    proposals = " or ".join(f'"{each}"' if " " in each else each for each in close)
    raise InvalidArgumentError(
        f"{len(found) or 'No'} entries have the name {name!r}. "
        f"Use {proposals or 'an entry of `keras-strategies explain`'}."
    )


def _rendered(text: str) -> str:
    """Markdown as text: the rows of a table as paragraphs, links as their texts."""
    blocks = []
    for block in text.strip().split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            heads = _cells(lines[0])
            for line in lines[2:]:
                blocks.append(_row(heads, _cells(line)))
        elif lines[0].startswith("```"):
            blocks.append("\n".join(lines[1:-1]))
        else:
            blocks.append(_wrapped(block))
    return "\n\n".join(blocks)


def _row(heads: list[str], cells: list[str]) -> str:
    first, *others = cells
    pairs = zip(heads[1:], others, strict=True)
    return "\n".join(
        [
            _wrapped(first),
            *(_wrapped(f"{head}: {cell}", indent="    ") for head, cell in pairs),
        ]
    )


def _cells(line: str) -> list[str]:
    return [each.strip() for each in _COLUMN.split(line.strip().strip("|"))]


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(
        _plain(text),
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  " if indent else "",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(text: str) -> str:
    """Without links, and without the marks of text that is code from end to end."""
    text = _LINK.sub(r"\1", text).replace("\\|", "|")
    whole = _CODE.fullmatch(text)
    return whole[2].strip() if whole and whole[1] not in whole[2] else text
