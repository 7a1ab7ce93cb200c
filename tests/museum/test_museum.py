"""The museum: published bugs, what frameworks give today, and the page made from it.

By day one script of each backend runs, at night all. `python -m museum --write` runs
them all and writes the page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import pytest
from verification import forked

import keras_strategies as ks
from keras_strategies.verification.processes import verify_processes
from museum.common import FRAMEWORKS
from museum.page import PAGE, RESULTS, page, scripts
from museum.verify import VERDICTS, Exhibit

pytestmark = pytest.mark.one_backend

NIGHTLY = pytest.mark.nightly

ROOT = Path(__file__).parents[2]

NAMES = [
    name
    for name, about in scripts().items()
    if FRAMEWORKS[about["Framework"]][1] == keras.backend.backend()
]
BY_DAY = {
    "jax": "jax_grad_of_psum",
    "torch": "ddp_uneven_rows",
    "tensorflow": "tf_clipped_replicas",
}


def measured(names: list[str]) -> dict[str, dict[str, Any]]:
    process = subprocess.run(
        [sys.executable, "-m", "museum", "--in-this-process", *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=570,
    )
    assert process.returncode == 0, process.stderr
    found = dict(json.loads(line) for line in process.stdout.splitlines())
    assert set(found) == set(names), process.stderr
    return found


def check(name: str, result: dict[str, Any]) -> None:
    assert "error" not in result, f"{name}: {result}"
    ours, one = result["ours"], result["one_device"]
    assert ours == pytest.approx(one, rel=1e-4, abs=1e-6), name
    differs = result["framework"] != pytest.approx(one, rel=1e-4, abs=1e-7)
    assert differs == (result["state"] in ("alive", "re-enacted")), f"{name}: {result}"
    is_by_hand = "Re-enacted" in scripts()[name]
    assert (result["state"] == "re-enacted") == is_by_hand, f"{name}: {result}"


@pytest.mark.one_backend("jax")
@pytest.mark.slow(seconds=7)
@pytest.mark.multiprocess
def test_a_script_gives_the_number_of_one_device_for_ours() -> None:
    name = BY_DAY[keras.backend.backend()]
    found = measured([name])
    check(name, found[name])
    assert found[name]["state"] == "alive"


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_all_scripts_give_the_number_of_one_device_for_ours() -> None:
    found = measured(NAMES)
    for name in NAMES:
        check(name, found[name])


def test_scripts_are_short_and_say_where_the_bug_is_published() -> None:
    every = scripts()
    assert len(every) >= 30
    assert {about["Framework"] for about in every.values()} == set(FRAMEWORKS)
    for name, about in every.items():
        text = (ROOT / "museum" / f"{name}.py").read_text()
        assert len(text.splitlines()) <= 40, name
        assert about["Link"].startswith("https://"), name
        assert about["Story"], name


def test_what_is_alive_has_a_text_to_send_upstream() -> None:
    results = json.loads(RESULTS.read_text())["results"]
    alive = {name for name, result in results.items() if result["state"] == "alive"}
    assert alive
    assert {name for name in alive if "Upstream" not in scripts()[name]} == set()


def test_the_page_is_that_of_the_last_run() -> None:
    """`python -m museum.page` writes it after a change of a docstring."""
    results = json.loads(RESULTS.read_text())
    assert set(results["results"]) == set(scripts())
    assert PAGE.read_text() == page(results)
    for name, result in results["results"].items():
        check(name, result)


NIGHTLY = pytest.mark.nightly


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "ddp_uneven_rows" else [NIGHTLY])
        for name in NAMES
        if VERDICTS[name] != "no devices"
    ],
)
def test_verification_finds_the_bug(name: str, monkeypatch) -> None:
    monkeypatch.setattr(verify_processes, "launch", forked.launch)
    processes = 2 if keras.backend.backend() == "torch" else 1
    report = ks.verify_processes(Exhibit(name), processes, 3 - processes)
    verdict = VERDICTS[name]
    assert report.equal == (verdict == "equal"), report
    if verdict not in ("equal", "found"):
        assert report.cause == verdict, report


def test_all_scripts_but_those_of_one_device_are_verified() -> None:
    assert set(VERDICTS) == set(scripts())
    left_out = [name for name, each in VERDICTS.items() if each == "no devices"]
    assert len(left_out) <= 4
