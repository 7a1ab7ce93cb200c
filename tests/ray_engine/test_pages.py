"""Code of the page about Ray runs when it is pasted, on a cluster of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.forker import run_code
from pages.pasted import code_blocks

pytestmark = [pytest.mark.multiprocess, pytest.mark.nightly]

NODES, NODE = 1, {"num_cpus": 3}

BLOCKS = code_blocks("docs/guides/ray.md", "runs on ray")


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_code_of_the_page_runs(ray_nodes: Any, tmp_path: Path, code: str) -> None:
    run_code(tmp_path, code, timeout=300, RAY_ADDRESS=ray_nodes.address)
