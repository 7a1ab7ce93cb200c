"""The package for installers: extras, requirements, files in the wheel, pins."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import keras_strategies as ks

pytestmark = pytest.mark.one_backend("jax")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements(lines: list[str]) -> list[Requirement]:
    """The requirements on others; an extra may also name extras of this package."""
    found = [Requirement(line) for line in lines]
    return [item for item in found if item.name != PROJECT["name"]]


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    matches = [re.fullmatch(r"([\w.-]+)==(\S+)", line) for line in lines]
    return {canonicalize_name(m[1]): Version(m[2]) for m in matches if m}


def test_installed_metadata_is_that_of_this_checkout() -> None:
    installed = importlib.metadata.metadata("keras-strategies")
    assert installed["Version"] == PROJECT["version"] == ks.__version__
    assert installed["Requires-Python"] == ">=3.11"
    assert set(installed.get_all("Provides-Extra", [])) == set(EXTRAS)


def test_the_promised_extras_exist_and_all_names_those_that_a_user_needs() -> None:
    promised = {"jax", "torch", "tensorflow", "ps", "examples", "test", "all"}
    assert promised <= set(EXTRAS)
    (everything,) = EXTRAS["all"]
    assert Requirement(everything).extras == set(EXTRAS) - {"all", "docs", "test"}


def test_the_base_install_brings_no_framework_and_the_type_marker() -> None:
    names = {item.name for item in requirements(PROJECT["dependencies"])}
    assert names == {"cloudpickle", "keras", "numpy", "optree"}
    assert (ROOT / "keras_strategies" / "py.typed").is_file()


@pytest.mark.parametrize("extra", ["base", *sorted(set(EXTRAS) - {"ps", "all"})])
def test_every_requirement_of_the_tests_has_a_pin_in_its_range(extra: str) -> None:
    # The parameter servers' engine is not tested yet, so "ps" has no pin.
    lines = PROJECT["dependencies"] if extra == "base" else EXTRAS[extra]
    for item in requirements(lines):
        pin = pins().get(canonicalize_name(item.name))
        assert pin is not None, f"constraints.txt does not pin {item.name}"
        assert item.specifier.contains(pin), f"{item} excludes the pinned {pin}"
    assert pins()["tensorflow-cpu"] == pins()["tensorflow"]


def test_the_newest_notes_are_of_this_version_and_dated() -> None:
    notes = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert re.fullmatch(rf"{re.escape(ks.__version__)}, \d{{4}}-\d\d-\d\d", notes[0])


def test_the_table_of_versions_is_that_of_ci() -> None:
    script = str(ROOT / "tests" / "packaging" / "versions.py")
    command = [sys.executable, script, "--check"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
