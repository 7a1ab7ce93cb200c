"""Commands of the pages: their arguments are those of the programs, and they run."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness.processes import launch, output_of
from pages.pasted import PAGES, ROOT, code_blocks

from keras_strategies.tools import cli

pytestmark = pytest.mark.one_backend

#: Lines of blocks for a shell, those that go on joined, and code in a sentence.
SHELL = re.compile(r"^ *```sh\n(.*?)^ *```$", re.DOTALL | re.M)
INLINE = re.compile(r"`((?:keras-strategies|make|python) [^`]+)`")
#: What a command of a page stands for: a name, not an argument.
NAMED = {f"keras-strategies {name}" for name in ("launch", "lead", "verify")}


def commands(program: str) -> list[tuple[str, str]]:
    """Pages and their commands of a program."""
    found = []
    pages = {**PAGES, "CONTRIBUTING.md": (ROOT / "CONTRIBUTING.md").read_text()}
    for page, text in pages.items():
        blocks = "".join(SHELL.findall(text)).replace("\\\n", " ")
        for line in [*blocks.splitlines(), *INLINE.findall(text)]:
            # After variables, `srun`, or `kubectl exec POD --`.
            command = re.search(rf"(?:^|\s){program}\s.*", line.split(" && ")[0])
            if command and not line.startswith("#"):
                words = shlex.split(command[0], comments=True)
                found.append((page, shlex.join(words)))
    return sorted({*found})


@pytest.mark.parametrize(("page", "command"), commands("keras-strategies"))
def test_a_command_of_this_package_has_its_arguments(page: str, command: str) -> None:
    if command in NAMED:
        return
    words = shlex.split(command)[1:]
    if words[:1] == ["launch"] and not words[-1].endswith(".py"):
        # An option that a sentence names.
        words += ["2", "train.py"] if words[-1].startswith("--") else ["train.py"]
    replaced = ["2" if word == "N" else word for word in words]
    assert cli._parser().parse_args(replaced).command == words[0]


@pytest.mark.parametrize(("page", "command"), commands("make"))
def test_a_target_of_make_exists(page: str, command: str) -> None:
    dry = [*shlex.split(command), "-n"]
    process = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


@pytest.mark.parametrize(("page", "command"), commands("python"))
def test_a_script_of_this_repository_exists(page: str, command: str) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "-m":
        # `build` and `twine` are programs of a release.
        module = words[1].replace(".", "/")
        assert words[1] in ("build", "twine") or (ROOT / module).exists(), command
    elif words[0] not in ("script.py", "FILE"):
        found = [*ROOT.glob(words[0]), *(ROOT / "examples").glob(words[0])]
        assert found or words[0] == "train.py", command


def workers_script(folder: Path) -> str:
    """The README's first script with the strategy of *Many machines*."""
    code = code_blocks("README.md")[0]
    made = 'strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])'
    (line,) = [each for each in code.splitlines() if each.startswith(made)]
    code = code.replace(line + "\n", "")
    after = "import keras_strategies as ks\n"
    code = code.replace(after, after + "strategy = ks.MultiWorkerMirroredStrategy()\n")
    path = folder / "train.py"
    path.write_text(code + "print('weights', model.get_weights()[0].sum())\n")
    return str(path)


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_the_commands_of_the_readme_train_on_several_workers(tmp_path: Path) -> None:
    script = workers_script(tmp_path)
    (given,) = re.findall(
        r"^keras-strategies (launch .*train.py)", PAGES["README.md"], re.M
    )
    words = shlex.split(given.replace("train.py", script))[1:]
    process = launch(*words)
    assert process.returncode == 0, process.stderr
    weights = re.findall(r"weights (\S+)", process.stdout)
    assert len(weights) == 4 and len({*weights}) == 1, process.stdout
    (given,) = re.findall(r"^torchrun (.*train.py)", PAGES["README.md"], re.M)
    # Of its nodes, this is the first and only one.
    given = given.replace("--nnodes=2", "--nnodes=1").replace(
        "=a:29400", "=localhost:0"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", *shlex.split(given)]
    output = output_of([*torchrun[:-1], script])
    (alone,) = re.findall(r"weights (\S+)", output)
    assert float(alone) == pytest.approx(float(weights[0]), rel=1e-4)


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_the_commands_of_verify_and_choose_run(tmp_path: Path) -> None:
    code = next(c for c in code_blocks("docs/guides/verify.md") if "def build" in c)
    code = (
        code.partition("report = ")[0] + 'data = {"x": x, "y": y, "batch_size": 16}\n'
    )
    for name in ("train.py", "script.py"):
        (tmp_path / name).write_text(code)
    for command in (
        "keras-strategies verify train.py:build",
        "keras-strategies choose script.py:build",
    ):
        (line,) = {each for _, each in commands("keras-strategies") if command in each}
        words = [sys.executable, "-m", "keras_strategies", *shlex.split(line)[1:]]
        output_of(words, tmp_path)


@pytest.mark.nightly
@pytest.mark.one_backend("jax")
def test_the_site_is_built_strictly(tmp_path: Path) -> None:
    """`make docs`, in a copy, since it makes an environment."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, files.stdout.split("\0")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    output_of(["make", "docs"], tmp_path, timeout=590)
    for page in ("index.html", "benchmarks/index.html", "notebooks/01_mirrored_fit"):
        assert (tmp_path / "site" / page).exists()
    assert os.listdir(tmp_path / "site" / "img" / "tutorials")
