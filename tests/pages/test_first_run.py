"""The page *First run*: its script is killed and started again, as the page shows."""

from __future__ import annotations

import re
import time
from pathlib import Path

import keras
import pytest
from harness.forker import Forker
from pages.pasted import PAGES, code_blocks

pytestmark = [pytest.mark.one_backend, pytest.mark.nightly, pytest.mark.multiprocess]

BACKEND = keras.backend.backend()
PAGE = "docs/first-run.md"
#: The script changes its folder first; `Forker` starts it in that of the tests.
START = "import os, sys\nos.chdir(sys.argv[1])\n"


def test_the_killed_run_ends_as_the_other_one(tmp_path: Path) -> None:
    [code] = code_blocks(PAGE, "runs alone")
    logs = {}
    with Forker(imports_strategies=False) as forker:
        for name in ("whole", "killed"):
            folder = tmp_path / name
            folder.mkdir()
            script = folder / "train.py"
            script.write_text(START + code)

            def start(number: int, folder: Path = folder, script: Path = script):
                return forker.start(folder / f"{number}.log", str(script), str(folder))

            first = start(1)
            if name == "killed":
                until = time.monotonic() + 200
                while "Epoch 4/5" not in first.text():
                    assert first.ended() is None and time.monotonic() < until
                    time.sleep(0.05)
                first.kill()
                assert (folder / "log.csv").read_text().count("\n") == 4
                second = start(2)
                assert second.wait(200)[0] == 0, second.text()
                assert re.search(r"Resume: continuing at epoch \d of 5", second.text())
            else:
                assert first.wait(200)[0] == 0, first.text()
                shown = "Resume: no snapshot in 'snapshots', training begins."
                assert shown in first.text() and shown in PAGES[PAGE]
                share = "not counted" if BACKEND == "jax" else "100 %"
                assert f"in parallel  {share}" in first.text()
                again = start(2)
                assert again.wait(200)[0] == 0
                shown = "Resume: training in 'snapshots' is finished, after 5 of 5 "
                assert shown in again.text() and shown in PAGES[PAGE]
            logs[name] = (folder / "log.csv").read_text()
    assert logs["killed"] == logs["whole"]
