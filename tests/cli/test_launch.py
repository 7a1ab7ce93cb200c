"""`keras-strategies launch` with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX"),
]
TIMEOUT = 60


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "keras_strategies", "launch", *arguments]


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=TIMEOUT
    )


@pytest.fixture
def script(tmp_path):
    """Writes a script, which can call `task()` and `wait_for_all(n)`."""

    def write(body: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(
            "import json, os, pathlib, sys, time\n"
            "config = json.loads(os.environ['TF_CONFIG'])\n"
            "me = config['task']['type'] + str(config['task']['index'])\n"
            f"here = pathlib.Path({str(tmp_path)!r})\n"
            "(here / f'{me}.pid').write_text(str(os.getpid()))\n" + body
        )
        return str(path)

    return write


def pids(folder: Path, count: int) -> list[int]:
    """The processes that have begun, when there are so many."""
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        found = [path.read_text() for path in folder.glob("*.pid")]
        if len(found) == count and all(found):
            return [int(text) for text in found]
        time.sleep(0.05)
    raise AssertionError(f"{count} tasks did not begin")


def assert_gone(numbers: list[int]) -> None:
    _, left = psutil.wait_procs(
        [psutil.Process(n) for n in numbers if psutil.pid_exists(n)], timeout=30
    )
    assert not [p for p in left if p.status() != psutil.STATUS_ZOMBIE]


def test_each_task_gets_its_place_and_its_lines_are_labelled(script):
    path = script("print(json.dumps(config), sys.argv[1:])\n")
    arguments = ("--workers", "2", "--chief", path, "--rate", "0.1")
    process = launch(*arguments)
    assert process.returncode == 0, process.stderr
    lines = sorted(process.stdout.splitlines())
    assert [line.split("]")[0] for line in lines] == [
        "[chief 0",
        "[worker 0",
        "[worker 1",
    ]
    configs = [json.loads(re.search(r"\{.*\}", line)[0]) for line in lines]
    assert len({json.dumps(config["cluster"]) for config in configs}) == 1
    cluster = configs[0]["cluster"]
    addresses = [address for job in cluster.values() for address in job]
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert configs[0]["task"] == {"type": "chief", "index": 0}
    assert lines[0].endswith("['--rate', '0.1']")


def test_servers_are_ended_when_the_workers_are_done(script, tmp_path):
    path = script(
        "while len(list(here.glob('*.pid'))) < 3: time.sleep(0.01)\n"
        "if me.startswith('ps'): time.sleep(600)\n"
    )
    assert launch("--workers", "1", "--ps", "2", path).returncode == 0
    assert_gone(pids(tmp_path, 3))


def test_one_that_fails_ends_all_with_its_exit_code(script, tmp_path):
    path = script(
        "while len(list(here.glob('*.pid'))) < 3: time.sleep(0.01)\n"
        "if me == 'worker1': sys.exit(7)\n"
        "time.sleep(600)\n"
    )
    process = launch("--workers", "3", path)
    assert process.returncode == 7
    assert "worker 1 ended with exit code 7" in process.stderr
    assert_gone(pids(tmp_path, 3))


def test_what_ignores_being_asked_is_ended_too(script, tmp_path, monkeypatch):
    monkeypatch.setattr("keras_strategies.cli.processes.GRACE_SECONDS", 1.0)
    from keras_strategies.cli.processes import Task, run_together

    path = script(
        "import signal\n"
        "if me == 'worker0': signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "(here / f'{me}.ready').touch()\n"
        "while len(list(here.glob('*.ready'))) < 2: time.sleep(0.01)\n"
        "if me == 'worker1': os.kill(os.getpid(), signal.SIGSEGV)\n"
        "time.sleep(600)\n"
    )
    tasks = []
    for index in range(2):
        config = {"cluster": {}, "task": {"type": "worker", "index": index}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        tasks.append(Task(f"worker {index}", [sys.executable, path], environment))
    with (tmp_path / "log").open("wb") as log:
        ended = run_together(tasks, log)
    assert (ended.code, ended.task) == (128 + signal.SIGSEGV, "worker 1")
    assert_gone(pids(tmp_path, 2))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_launcher(script, tmp_path, number):
    path = script("time.sleep(600)\n")
    process = subprocess.Popen(
        command("--workers", "2", path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        begun = pids(tmp_path, 2)
        process.send_signal(number)
        process.communicate(timeout=TIMEOUT)
        assert process.returncode != 0
        assert_gone(begun)
    finally:
        process.kill()
        process.wait()


def test_a_cluster_that_failed_is_started_again(script, tmp_path):
    path = script(
        "(here / me).open('a').write('.')\n"
        "if me == 'worker0' and len((here / me).read_text()) < 3: sys.exit(3)\n"
        "print('done')\n"
    )
    process = launch("--workers", "1", "--max-restarts", "2", path)
    assert process.returncode == 0
    assert (tmp_path / "worker0").read_text() == "..."
    assert process.stderr.count("starting again") == 2
    (tmp_path / "worker0").unlink()
    assert launch("--workers", "1", "--max-restarts", "1", path).returncode == 3


def test_devices_per_worker_are_the_strategys(script):
    path = script(
        "import keras_strategies as ks\n"
        "print(ks.MirroredStrategy().num_replicas_in_sync)\n"
    )
    process = launch("--workers", "1", "--devices-per-worker", "3", path)
    assert process.stdout.splitlines() == ["[worker 0] 3"], process.stderr


def test_numbers_that_cannot_be(script):
    process = launch("--workers", "0", script(""))
    assert process.returncode == 2
    assert "--workers is 0; it is 1 or more" in process.stderr


def test_doctor_says_what_is_set_and_who_answers(monkeypatch):
    import socket

    with socket.socket() as server, socket.socket() as silent:
        server.bind(("127.0.0.1", 0))
        server.listen()
        silent.bind(("127.0.0.1", 0))
        there, not_there = server.getsockname()[1], silent.getsockname()[1]
        cluster = {"worker": ["me:1", f"127.0.0.1:{there}", f"127.0.0.1:{not_there}"]}
        config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
        process = subprocess.run(
            [sys.executable, "-m", "keras_strategies", "doctor"],
            env={**os.environ, "TF_CONFIG": json.dumps(config)},
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
    assert process.returncode == 1
    assert f"worker 1 at 127.0.0.1:{there}: answers" in process.stdout
    assert f"worker 2 at 127.0.0.1:{not_there}: does not answer" in process.stdout
    assert "keras " in process.stdout
    assert "cpu:0" in process.stdout


def test_doctor_shows_what_cannot_be():
    process = subprocess.run(
        [sys.executable, "-m", "keras_strategies", "doctor"],
        env={**os.environ, "TF_CONFIG": "{"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert process.returncode == 1
    assert "TF_CONFIG is not JSON" in process.stdout
