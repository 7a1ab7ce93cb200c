"""README, pages, notebooks: code runs, links lead somewhere, quoted errors are real.

All code of the README, the home page and the guides runs when it is pasted: `pasted.py`
has the marks that say where the tests do so. What a strategy computes on each backend
is tested elsewhere. `make docs` checks the links between pages.
"""

from __future__ import annotations

import ast
import base64
import importlib.metadata
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
from exactness import cases as exactness_cases
from exactness import single_cases
from pages.pasted import BLOCK, FIRST_SCREENS, PAGES, ROOT, is_diff, side_of_diff

import keras_strategies as ks

pytestmark = pytest.mark.one_backend("jax")

TROUBLESHOOTING = ROOT / "docs" / "troubleshooting.md"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
# A row's first cell is code, in which `...` stands for what differs.
ROW = re.compile(r"^\| (`+)(.+?)\1 \| [^|]+ \| [^|]+ \|$", re.M)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page in FIRST_SCREENS or "/guides/" in page]
)
def test_all_code_of_first_screens_and_guides_is_run(page: str) -> None:
    # A diff without a mark is a part of one that runs.
    blocks = BLOCK.findall(PAGES[page])
    marks = [mark for mark, code in blocks if mark or not is_diff(code)]
    assert set(marks) <= {"runs", "runs alone", "runs on ray"}


@pytest.mark.parametrize("page", PAGES)
def test_code_of_a_page_is_python(page: str) -> None:
    for _, code in BLOCK.findall(PAGES[page]):
        ast.parse(side_of_diff(code, "+") if is_diff(code) else code)


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(page: str) -> None:
    text = (ROOT / page).read_text()
    assert [link for link in LINK.findall(text) if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if "/guides/" in page])
def test_a_guide_says_what_can_go_wrong_and_what_is_next(page: str) -> None:
    titles = re.findall(r"^## (.*)$", PAGES[page], re.M)
    assert titles[-2:] == ["What can go wrong", "Next"]


def test_the_readme_stays_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


def test_pictures_of_a_terminal_show_the_text_of_their_pages() -> None:
    terminal = runpy.run_path(str(ROOT / "docs" / "terminal.py"))
    for name in terminal["PICTURES"]:
        expected = terminal["picture"](terminal["text_of"](name))
        assert (ROOT / "docs" / "img" / name).read_text() == expected, (
            "Run `python docs/terminal.py`."
        )


def test_the_picture_of_a_killed_run_is_that_of_its_notebook() -> None:
    path = ROOT / "notebooks" / "06_elastic_training.ipynb"
    cells = json.loads(path.read_text())["cells"]
    data = [o.get("data", {}) for cell in cells for o in cell.get("outputs", [])]
    shown = (ROOT / "docs" / "img" / "killed.png").read_bytes()
    assert shown in [base64.b64decode(each.get("image/png", "")) for each in data]


def test_tables_of_benchmarks_are_those_of_the_results() -> None:
    """`python benchmarks/page.py` writes them."""
    command = [sys.executable, str(ROOT / "benchmarks" / "page.py"), "--check"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    blocks = re.findall("<!-- measured: (.*) -->", PAGES["docs/benchmarks.md"])
    assert {block.partition(",")[0] for block in blocks} == {
        *("fit", "first step", "loops", "two workers", "faults"),
        *("compiled calls", "recording costs", "verify costs"),
        *("elasticity", "snapshots", "fit gpu", "start", "memory"),
        *("parameter servers", "model parallelism"),
        *("without strategy", "first step large"),
        *("communication", "python time", "slow input", "random numbers"),
        *("batch comparison", "ratios", "soak", "lead costs"),
        *("fsdp", "fsdp memory", "mixing rows", "presets", "uneven rows"),
        "parameter server sizes",
    }


RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
ABOUT = {"date", "commit", "cpu", "cores", "versions"}


def test_results_of_benchmarks_record_how_they_were_measured(tmp_path) -> None:
    measuring = runpy.run_path(str(ROOT / "benchmarks" / "measuring.py"))
    path = tmp_path / "results" / "some.json"
    given = {"torch": {"mlp": 1.5}, "jax": {"mlp": 2.5}}
    for part, values in given.items():
        measuring["Results"](path).put(part, values)
    assert json.loads(path.read_text())["results"] == given
    for about in measured(path):
        assert set(about) == ABOUT
        assert about["versions"]["keras"] == keras.__version__


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_stored_results_say_how_each_part_was_measured(path: Path) -> None:
    assert all(about["versions"]["keras"] for about in measured(path))


def measured(path: Path) -> list[dict[str, Any]]:
    """How each of the results of a file was measured."""
    found = json.loads(path.read_text())
    assert found["measured"].keys() == found["results"].keys()
    for about in found["measured"].values():
        assert about.keys() >= ABOUT and all(about.values())
    return list(found["measured"].values())


def test_results_of_benchmarks_record_the_version_of_keras_nightly(monkeypatch) -> None:
    def version(package: str) -> str:
        if package != "keras-nightly":
            raise importlib.metadata.PackageNotFoundError(package)
        return "3.16.0.dev2026112203"

    monkeypatch.setattr(importlib.metadata, "version", version)
    measuring = runpy.run_path(str(ROOT / "benchmarks" / "measuring.py"))
    versions = measuring["conditions"]()["versions"]
    assert versions.keys() == {"python", "keras"}
    assert versions["keras"] == "3.16.0.dev2026112203"


def test_every_error_has_an_entry() -> None:
    classes = {
        name for name, value in vars(ks.errors).items() if isinstance(value, type)
    }
    titles = r"^### (\w+Error|WorkersChanged)$"
    entries = set(re.findall(titles, TROUBLESHOOTING.read_text(), re.M))
    assert entries == classes


def test_quoted_errors_are_those_of_the_library() -> None:
    rows = ROW.findall(TROUBLESHOOTING.read_text())
    parts = [part.strip() for _, text in rows for part in text.split("...")]
    quotes = [part for part in parts if part.strip(" ,")]
    assert len(quotes) > 60
    # All string constants, those of a literal of several lines joined.
    texts = "\n".join(
        node.value
        for path in (ROOT / "keras_strategies").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    assert [text for text in quotes if text not in texts] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_of_a_notebook_are_those_of_its_code(path: Path) -> None:
    """`python notebooks/execute.py FILE` makes them again."""
    import nbformat

    execute = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))
    notebook = nbformat.read(path, as_version=4)
    assert notebook.metadata[execute["KEY"]]["code"] == execute["digest"](notebook)
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    assert not [o for o in outputs if o.output_type == "error"]
    shown = [output.get("data", {}) for output in outputs]
    assert any("image/png" in data for data in shown)
    figures = [data for data in shown if data.get("text/plain", "")[:7] == "<Figure"]
    assert [data for data in figures if "image/png" not in data] == []
    opening = notebook.cells[0].source.replace("\n", " ")
    assert "You will see" in opening and re.search("For .* of your own", opening)
    code = "".join(c.source for c in notebook.cells if c.cell_type == "code")
    assert re.search(r"keras_strategies\.|from keras_strategies", code) is None


def test_the_tutorial_on_kubernetes_shows_the_manifest_that_is_tested() -> None:
    page = PAGES["docs/tutorials/kubernetes.md"]
    manifest = (ROOT / "examples" / "kubernetes" / "multi_worker.yaml").read_text()
    shown = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.M)
    assert len(shown) == 6
    assert [part for part in shown if part not in manifest] == []


def test_features_of_keras_have_tests() -> None:
    features = runpy.run_path(str(ROOT / "tests" / "pages" / "features.py"))
    text = PAGES["docs/keras-features.md"]
    assert features["rewritten"](text) == text
    groups = set(re.findall(r"<!-- features: ([\w ]+) -->", text))
    assert groups == set(features["FEATURES"])
    cases = {case.name for case in [*exactness_cases.CASES, *single_cases.CASES]}
    for group in features["FEATURES"].values():
        for _, tests, _ in group:
            for test in tests.split():
                file, _, name = test.rpartition("::")
                source = (ROOT / "tests" / file).read_text() if file else ""
                assert f"\ndef {name}(" in source or test in cases, test
