"""The page of the site, from the last run.

`python -m museum --write` writes results.json and the page, `python -m museum.page` the
page alone.
"""

from __future__ import annotations

import ast
import datetime
import json
from pathlib import Path
from typing import Any

from museum.common import FRAMEWORKS, fields, installed
from museum.verify import VERDICTS

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
PAGE = FOLDER.parent / "docs" / "silent-bugs.md"
NO_SCRIPTS = {"__init__", "__main__", "common", "page", "verify"}
#: Verdicts of `museum.verify` that are no causes.
WORDS = {
    "found": "different, with a guessed cause",
    "equal": "equal, as the bug is mended",
    "no devices": "not comparable, as one device has the bug, too",
}
STATES = {
    "alive": "Alive in the installed releases",
    "re-enacted": "Re-enacted by hand",
    "mended": "Mended in the installed releases",
}


def scripts() -> dict[str, dict[str, str]]:
    """Fields of the docstrings of all scripts, by name."""
    return {
        path.stem: fields(ast.get_docstring(ast.parse(path.read_text())) or "")
        for path in sorted(FOLDER.glob("*.py"))
        if path.stem not in NO_SCRIPTS
    }


def write_page(found: dict[str, dict[str, Any]]) -> None:
    """Stores what a run has measured, and writes the page.

    Args:
        found: what scripts have printed, by name. Others keep their stored results.
    """
    today = datetime.date.today().isoformat()
    every = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else {}
    every |= {name: {**own, "date": today} for name, own in found.items()}
    every = {name: every[name] for name in sorted(every) if name in scripts()}
    packages = ["keras", *sorted({package for package, _ in FRAMEWORKS.values()})]
    results = {
        "versions": {each: installed(each) for each in dict.fromkeys(packages)},
        "results": every,
    }
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if missing := sorted(set(scripts()) - set(every)):
        raise SystemExit(f"No page without results of {missing}.")
    PAGE.write_text(page(results))


def page(results: dict[str, Any]) -> str:
    """The page in Markdown.

    Args:
        results: the content of results.json.
    """
    about = scripts()
    numbers = results["results"]
    used = {each: v for each, v in results["versions"].items() if v is not None}
    absent = [each for each, v in results["versions"].items() if v is None]
    parts = [
        HEADER.format(
            count=len(about),
            dates=" to ".join(sorted({r["date"] for r in numbers.values()})),
            versions=", ".join(f"{each} {v}" for each, v in used.items()),
            absent=", ".join(absent),
            named=sum(verdict not in WORDS for verdict in VERDICTS.values()),
            words=", ".join(
                f"{[*VERDICTS.values()].count(word)} are {text}"
                for word, text in WORDS.items()
            ),
        )
    ]
    for state, title in STATES.items():
        own = [name for name in about if numbers[name]["state"] == state]
        if own:
            parts += [f"## {title}\n", TEXTS[state], _table(own, about, numbers)]
    parts.append("## Stories\n")
    for framework in FRAMEWORKS:
        own = [name for name in about if about[name]["Framework"] == framework]
        if own:
            parts.append(f"### {framework}\n")
            parts += [_story(name, about[name], numbers[name]) for name in own]
    return "\n".join(parts)


def _table(
    names: list[str], about: dict[str, dict[str, str]], numbers: dict[str, Any]
) -> str:
    lines = ["| framework | bug | number | it gives | one device | ours |"]
    lines += ["|---|---|---|---|---|---|"]
    for framework in FRAMEWORKS:
        for name in names:
            own, found = about[name], numbers[name]
            if own["Framework"] == framework:
                cells = [framework, f"[{own['Title'].rstrip('.')}](#{name})"]
                cells += [own["Number"], *map(_number, _three(found))]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _story(name: str, about: dict[str, str], found: dict[str, Any]) -> str:
    given, one, ours = map(_number, _three(found))
    text = [f"#### {name}\n", f"**{about['Title']}** {about['Story']}"]
    text.append(f"\n- {about['Number']}: {given}; one device {one}; ours {ours}")
    package, _ = FRAMEWORKS[about["Framework"]]
    version = f" ({package} {found['version']})" if found["version"] else ""
    text.append(f"- state: {found['state']}{version}")
    verdict = VERDICTS[name]
    text.append(f"- `verify` says: {WORDS.get(verdict, f'`{verdict}`')}")
    text.append(f"- reported: {about['Reported']}: <{about['Link']}>")
    for field in ("Re-enacted", "Published"):
        if field in about:
            text.append(f"- {field.lower()}: {about[field]}")
    text.append(f"- script: `museum/{name}.py`")
    if "Upstream" in about and found["state"] != "mended":
        text.append(f"- to send upstream: {about['Upstream']}")
    return "\n".join(text) + "\n"


def _three(found: dict[str, Any]) -> list[float]:
    return [found[key] for key in ("framework", "one_device", "ours")]


def _number(value: float) -> str:
    return f"{value:.4g}"


HEADER = """\
# Silent bugs

Training on several devices that gives other numbers than on one, without an error:
{count} published bugs, each as a script of at most 40 lines in `museum/` that shows the
number of the framework, of one device, and of this package. "Ours" is the same
computation under a strategy of two virtual devices.

```sh
python -m museum                      # all, against what is installed
python -m museum --framework torch    # those of a framework, package or backend
python -m museum ddp_uneven_rows      # one
```

This page is made from runs of {dates}, on two CPU cores, with {versions}. Not
installed: {absent}; their mistakes are re-enacted by hand in the framework that they
are built on.

Each is a case of `verify`, where devices can be compared: of {count}, {named} are found
and named, {words}. To check a script of your own, whatever its framework, run
`keras-strategies verify train.py:train --processes 2`:
[Is my run equal to one device?](guides/verify.md)
"""
TEXTS = {
    "alive": """\
The installed release gives this number. Some of it is documented behaviour: it is
listed because training does not say that its numbers are not those of one device.
""",
    "re-enacted": """\
The framework is not installed, or the mistake is one of code that uses it. The script
makes the same mistake by hand; what it gives says nothing about current releases.
""",
    "mended": """\
The installed release gives the number of one device.
""",
}

if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
