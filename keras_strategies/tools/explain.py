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
_DOTTED = re.compile(r"[\w.]+")
_WORD = re.compile(r"\w+")
_COMMON = frozenset(["a", "an", "in", "is", "it", "my", "of", "on", "or", "the", "to"])
_COLUMN = re.compile(r"(?<!\\)\|")


def explain(name: str | None = None) -> str:
    """Returns the causes of an error and what to do, as text for a terminal.

    Args:
        name: str, the name of an error class, with or without its module; the title of
            another entry, in upper or lower case, or its start; a message, or words of
            one; or words of what happens, such as `"slow"`. None for the list of all.

    Raises:
        InvalidArgumentError: no entry, or more than one, is meant.
    """
    entries = _entries()
    if name is None:
        return "\n".join(["keras-strategies explain NAME, one of:", *entries])
    title = _title(name, entries)
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


def _title(name: str, entries: dict[str, str]) -> str:
    titles = list(entries)
    lower = {title.lower(): title for title in titles}
    given = name.strip().lower()
    # Of a class, its name without the modules before it.
    last = given.rpartition(".")[2] if _DOTTED.fullmatch(given) else given
    for each in (given, last):
        if each in lower:
            return lower[each]
    found = [title for key, title in lower.items() if key.startswith(given)]
    if len(found) == 1:
        return found[0]
    found = found or _searched(given, entries)
    if len(found) == 1:
        return found[0]
    close = found[:6] or difflib.get_close_matches(name, titles, n=3, cutoff=0.6)
    proposals = " or ".join(f'"{each}"' if " " in each else each for each in close)
    raise InvalidArgumentError(
        f"{len(found) or 'No'} entries have the name {name!r}. "
        f"Use {proposals or 'an entry of `keras-strategies explain`'}."
    )


def _searched(given: str, entries: dict[str, str]) -> list[str]:
    """The entries that are meant by a message, or by words of what happens.

    A quoted message is found in what is given, whatever stands where it has `...`. Of
    words, those of a title count most, and an entry needs each of them.
    """
    quoted = {title: _quoted(text, given) for title, text in entries.items()}
    longest = max(quoted.values())
    if longest:
        return [title for title, length in quoted.items() if length == longest]
    words = [
        word if len(word) < 5 else word.removesuffix("s")
        for word in _WORD.findall(given)
        if word not in _COMMON
    ]
    if not words:
        return []
    by_titles = [t for t in entries if all(_begins(t.lower(), w) for w in words)]
    if by_titles:
        return by_titles
    return [
        title
        for title, text in entries.items()
        if all(_begins(f"{title} {text}".lower(), word) for word in words)
    ]


def _quoted(text: str, given: str) -> int:
    """The length of the longest message in an entry that is given; 0 without any.

    Of a message with `...`, its longest part counts.
    """
    found = 0
    for line in text.splitlines():
        parts = [part.strip(" .,:").lower() for part in line.split("...")]
        longest = max(parts, key=len)
        if len(longest.split()) > 2 and longest in given:
            found = max(found, len(longest))
    return found


def _begins(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word)}", text) is not None


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
    listed = _CODE.fullmatch(text)
    return listed[2].strip() if listed and listed[1] not in listed[2] else text
