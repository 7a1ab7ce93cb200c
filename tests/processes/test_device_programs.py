"""The script of a process, which `MirroredStrategy` starts again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from keras_strategies.processes.device_processes import Program, own_process

pytestmark = pytest.mark.one_backend("jax")

ROOT = Path(__file__).parents[2]
PRINT = """
import json, threading
from keras_strategies.processes.device_processes import Program
def show():
    found = Program.find()
    print(json.dumps(found and [found.command[1:], found.is_installed]))
if __name__ == "__main__":
    show()
"""


def run(*command: str, cwd: Path, text: str = "") -> object:
    options = {"input": text, "capture_output": True, "text": True, "timeout": 60}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(cwd)])}
    python = [sys.executable, *command]
    done = subprocess.run(python, cwd=cwd, env=environment, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    for name in ("train.py", "package/train.py"):
        (tmp_path / name).write_text(PRINT)
    return tmp_path


def test_a_script_is_found_with_its_arguments(folder: Path) -> None:
    found = run("-O", "train.py", "--steps", "3", "train.py", cwd=folder)
    path = str(folder / "train.py")
    assert found == [["-O", path, "--steps", "3", "train.py"], False]
    found = run("-m", "package.train", "--steps=3", cwd=folder)
    assert found == [["-m", "package.train", "--steps=3"], False]


RUNPY = "import runpy; runpy.run_path('train.py', run_name='__main__')"


@pytest.mark.parametrize(
    "command", [("-c", PRINT), ("-c", RUNPY), ("-i", "train.py"), ("-",)]
)
def test_other_code_is_no_script(folder: Path, command: tuple[str, ...]) -> None:
    assert run(*command, cwd=folder, text=PRINT * (command == ("-",))) is None


@pytest.mark.parametrize(
    "start",
    [
        "threading.Thread(target=show).start()",
        "import multiprocessing as mp; "
        "p = mp.get_context('spawn').Process(target=show); p.start(); p.join()",
    ],
)
def test_threads_and_processes_of_a_script_are_none(folder: Path, start: str) -> None:
    body = PRINT.removesuffix("    show()\n") + f"    {start}\n"
    (folder / "train.py").write_text(body)
    assert run("train.py", cwd=folder) is None


def test_commands_of_packages_are_installed(monkeypatch) -> None:
    main = sys.modules["__main__"]
    monkeypatch.setattr(os.path, "isfile", lambda file: True)
    monkeypatch.setattr(main, "__spec__", None)
    for name in ("purelib", "scripts"):
        path = os.path.join(sysconfig.get_path(name), "pytest")
        monkeypatch.setattr(main, "__file__", path)
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, path, "-x"])
        found = Program.find()
        assert found is not None and found.is_installed
        assert found.command == (sys.executable, path, "-x")


def test_the_number_of_a_process_is_read_once(monkeypatch) -> None:
    from keras_strategies.processes import device_processes

    monkeypatch.setattr(device_processes, "_own", None)
    given = {"addresses": ["127.0.0.1:1", "127.0.0.1:2"], "index": 1, "made_before": 0}
    monkeypatch.setenv("KS_DEVICE_PROCESS", json.dumps(given))
    found = own_process()
    assert found is not None and found.index == 1
    # A program that this one starts is not one of them.
    assert "KS_DEVICE_PROCESS" not in os.environ
    assert own_process() == found
