"""Which tasks a local cluster has, what is set for them, and their lines."""

from __future__ import annotations

import io
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from keras_strategies.processes import local_cluster, task_output
from keras_strategies.processes.local_cluster import (
    LocalCluster,
    LocalTask,
    visible_gpus,
)

pytestmark = pytest.mark.one_backend("jax")


def test_environments_extend_the_one_around() -> None:
    cluster = LocalCluster(2, devices_per_worker=3)
    outer = {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "", "TF_CONFIG": "old"}
    first = cluster.environments(outer)
    one = first[LocalTask("worker", 1)]
    assert one["HOME"] == "/h"
    assert one["KS_DEVICES_PER_WORKER"] == "3"
    assert int(one["OMP_NUM_THREADS"]) == max(1, local_cluster.core_count() // 2)
    assert json.loads(one["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert outer == {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "", "TF_CONFIG": "old"}
    asked = cluster.environments({**outer, "OMP_NUM_THREADS": "7"})
    assert asked[LocalTask("worker", 0)]["OMP_NUM_THREADS"] == "7"


def page_faults(environment: dict[str, str]) -> int:
    """Pages that the system gives a process for arrays as large as those before."""
    program = """
import resource
def step():
    large = [b"1" * (48 << 20) for _ in range(3)]
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    command = [sys.executable, "-c", program]
    return int(subprocess.check_output(command, env=environment, timeout=60))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="is about glibc")
def test_processes_keep_the_memory_of_a_step_for_the_next() -> None:
    outer = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    (kept,) = LocalCluster(1).environments(outer).values()
    assert page_faults(kept) < 50 < page_faults(outer)
    asked = {**outer, "MALLOC_TRIM_THRESHOLD_": "0"}
    (found,) = LocalCluster(1).environments(asked).values()
    assert found["MALLOC_TRIM_THRESHOLD_"] == "0"


@pytest.mark.parametrize(
    "cluster, gpus, shares",
    [
        (LocalCluster(2), "0,1,2,3", ["0,1", "2,3"]),
        (LocalCluster(2), "0,1,2", ["0", "1"]),
        (LocalCluster(2, devices_per_worker=1), "0,1,2,3", ["0", "1"]),
        (LocalCluster(2), "GPU-a,GPU-b", ["GPU-a", "GPU-b"]),
        # Fewer than workers: left as it is.
        (LocalCluster(2), "0", ["0", "0"]),
        # Servers have none, so that they do not take a worker's memory.
        (LocalCluster(1, ps=1), "0", ["0", ""]),
        (LocalCluster(2, ps=1, chief=True), "0", ["", "0", "0", ""]),
    ],
)
def test_shares_of_gpus(cluster, gpus, shares) -> None:
    found = cluster.environments({"CUDA_VISIBLE_DEVICES": gpus})
    assert [found[task]["CUDA_VISIBLE_DEVICES"] for task in cluster.tasks] == shares


@pytest.mark.parametrize(
    "text, gpus", [("", []), ("-1", []), ("0, 2", ["0", "2"]), ("1,-1,2", ["1"])]
)
def test_visible_gpus(text, gpus) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": text}) == gpus


@pytest.mark.parametrize(
    "written, expected",
    [
        (b"a\nb\r\nc", ["a", "b", "c"]),
        (b"1%\r2%\r3%\n", ["1%", "2%", "3%"]),
        (b"\n\nx\n", ["", "", "x"]),
        ("gr\u00fc\u00df\n".encode(), ["gr\u00fc\u00df"]),
        (b"\xff\n", ["\ufffd"]),
        (b"", []),
    ],
)
def test_lines(written, expected) -> None:
    for pieces in ([written], [written[i : i + 1] for i in range(len(written))]):
        assert read(pieces) == expected


def read(pieces: list[bytes]) -> list[str]:
    """What comes out when a writer writes these pieces one by one."""
    reading, writing = os.pipe()

    def write() -> None:
        for piece in pieces:
            os.write(writing, piece)
        os.close(writing)

    with ThreadPoolExecutor() as writer:
        writer.submit(write)
        found = [line for line, _ in task_output.lines(reading)]
    os.close(reading)
    return found


ENGINES = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795360289.288171   23852 port.cc:153] oneDNN custom operations are on. You
[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is 1
W1122 15:17:01.095542   25334 coordination_service.cc:185] [1] Using experimental \
recoverable task feature. The default shutdown barrier will only block tasks.
"""
PROGRAM = """\
E0000 00:00:1795360289.288171   23852 port.cc:153] oneDNN custom operations are off.
W1122 15:17:01.095542   25334 coordination_service.cc:185] LocalTask 1 was lost.
Epoch 1/2: [Gloo] Rank 0 is connected to 1 peer ranks.

[Gloo] Rank 1 could not connect
W0000 slow_operation_alarm.cc:73] Constant folding an instruction is taking > 1s
"""


@pytest.mark.parametrize("wanted", [False, True])
def test_lines_of_engines_are_left_out_unless_wanted(wanted) -> None:
    reading, writing = os.pipe()
    os.write(writing, (ENGINES + PROGRAM).encode())
    os.close(writing)
    stream = io.StringIO()
    task_output.copy(reading, stream, "worker 0", wanted)
    shown = stream.getvalue().splitlines()
    expected = (ENGINES if wanted else "") + PROGRAM
    assert shown == [f"[worker 0] {line}".rstrip() for line in expected.splitlines()]


def test_a_bar_in_a_file_is_a_line_once_a_second(monkeypatch) -> None:
    now = [100.0]
    monkeypatch.setattr(task_output.time, "monotonic", lambda: now[0])
    file = io.StringIO()
    for number in range(1, 31):
        now[0] += 0.1
        task_output.write(file, "worker 5", f"{number}/31", is_update=True)
    task_output.write(file, "worker 5", "31/31")
    shown = [line.split()[-1] for line in file.getvalue().splitlines()]
    assert shown[0] == "1/31" and shown[-1] == "31/31" and 3 <= len(shown) <= 5
