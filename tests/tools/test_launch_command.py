"""`keras-strategies launch` with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from harness.processes import (
    TIMEOUT,
    assert_gone,
    command,
    launch,
    pids,
    wait_until,
    write_script,
)

pytestmark = [
    pytest.mark.one_backend("jax"),
    pytest.mark.multiprocess,
    pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX"),
]


@pytest.fixture
def script(tmp_path):
    return lambda body: write_script(tmp_path, body)


@contextlib.contextmanager
def launched(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher that runs while the context is open."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(
        command("launch", *arguments), **pipes, text=True, start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


# --- Tasks and their output ---------------------------------------------------


def test_each_task_gets_its_place_and_its_lines_are_labelled(script):
    path = script("print(json.dumps(config), sys.argv[1:])\n")
    process = launch("--workers", "2", "--chief", path, "--rate", "0.1", "-v")
    assert process.returncode == 0, process.stderr
    lines = sorted(process.stdout.splitlines())
    labels = [line.split("]")[0] for line in lines]
    assert labels == ["[chief 0", "[worker 0", "[worker 1"]
    configs = [json.loads(re.search(r"\{.*\}", line)[0]) for line in lines]
    assert len({json.dumps(config["cluster"]) for config in configs}) == 1
    cluster = configs[0]["cluster"]
    counts = {job: len(tasks) for job, tasks in cluster.items()}
    assert counts == {"chief": 1, "worker": 2}
    addresses = [address for job in cluster.values() for address in job]
    assert len(set(addresses)) == 3
    assert all(address.startswith("127.0.0.1:") for address in addresses)
    assert configs[2]["task"] == {"type": "worker", "index": 1}
    assert lines[0].endswith("['--rate', '0.1', '-v']")


def test_both_streams_stay_apart_and_no_line_is_torn(script):
    path = script(
        "for i in range(300):\n"
        "    print(me, i, 'x' * 300)\n"
        "    print(me, i, 'y' * 300, file=sys.stderr)\n"
        "print('no end of line', end='')\n"
    )
    process = launch("--workers", "3", path)
    for text, letter in ((process.stdout, "x"), (process.stderr, "y")):
        for worker in range(3):
            own = [line for line in text.splitlines() if f"r{worker} " in line]
            label, end = f"[worker {worker}] worker{worker}", letter * 300
            assert own == [f"{label} {i} {end}" for i in range(300)]
    assert process.stdout.count("] no end of line\n") == 3


def test_lines_come_while_the_task_is_still_running(script, tmp_path):
    path = script(
        "print('begun')\n"
        "while not (here / 'go').exists(): time.sleep(0.01)\n"
        "print('done')\n"
    )
    with subprocess.Popen(
        command("launch", "--workers", "1", path), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "[worker 0] begun\n"
        (tmp_path / "go").touch()
        assert process.communicate(timeout=TIMEOUT)[0] == "[worker 0] done\n"
    assert process.returncode == 0


def test_a_module_may_be_launched(script, tmp_path):
    script("print('as a module', __name__)\n")
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    process = launch("--workers", "1", "-m", "script", PYTHONPATH=path)
    assert process.stdout == "[worker 0] as a module __main__\n", process.stderr


def test_a_run_goes_on_when_nobody_reads_it_any_more(script, tmp_path):
    path = script("for i in range(1000): print('x' * 1000)\nwrite(me + '.done', '')\n")
    line = " ".join(command("launch", "--workers", "2", path)) + " | head -1"
    shell = ["bash", "-o", "pipefail", "-c", line]
    process = subprocess.run(shell, capture_output=True, text=True, timeout=TIMEOUT)
    assert process.returncode == 0
    assert len(process.stdout.splitlines()) == 1
    assert process.stderr == ""
    assert len(list(tmp_path.glob("*.done"))) == 2


# --- Devices ------------------------------------------------------------------


def test_gpus_are_shared_among_those_that_compute(script):
    path = script(
        "print(os.environ['CUDA_VISIBLE_DEVICES'], "
        "os.environ.get('KS_DEVICES_PER_WORKER'))\n"
    )
    arguments = ("--workers", "2", "--ps", "1", "--devices-per-worker", "2", path)
    process = launch(*arguments, CUDA_VISIBLE_DEVICES="4,5,6,7")
    assert "[worker 0] 4,5 None" in process.stdout
    assert "[worker 1] 6,7 None" in process.stdout
    too_many = launch(*arguments, CUDA_VISIBLE_DEVICES="0,1,2")
    assert too_many.returncode == 2
    assert "need 4 GPUs, but 3 are visible: 0, 1, 2" in too_many.stderr


# --- The end ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tasks", "waits"),
    [(["--ps", "2"], "me[:2] == 'ps'"), (["--ps", "1", "--chief"], "me != 'chief0'")],
    ids=["workers", "coordinating_chief"],
)
def test_all_are_ended_when_these_are_done(script, tmp_path, tasks, waits):
    path = script(f"begun(3)\nif {waits}: time.sleep(600)\n")
    assert launch("--workers", "1", *tasks, path).returncode == 0
    assert_gone(pids(tmp_path, 3))


def test_one_that_fails_ends_all_with_its_exit_code(script, tmp_path):
    path = script(
        "begun(3)\n"
        "if me == 'worker1':\n"
        "    print('last words', file=sys.stderr)\n"
        "    sys.exit(7)\n"
        "time.sleep(600)\n"
    )
    process = launch("--workers", "3", path)
    assert process.returncode == 7
    assert process.stderr.splitlines() == [
        "[worker 1] last words",
        "[launch] worker 1 ended with exit code 7; ending the others.",
    ]
    assert_gone(pids(tmp_path, 3))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_one_that_is_killed_is_named_with_its_signal(script, tmp_path, name):
    kill = f"if me == 'worker1': os.kill(os.getpid(), signal.{name})\n"
    process = launch("--workers", "2", script(f"begun(2)\n{kill}time.sleep(600)\n"))
    assert process.returncode == 128 + signal.Signals[name]
    assert f"worker 1 was ended by {name}" in process.stderr
    assert_gone(pids(tmp_path, 2))


# Ignores being asked, and has a child that does so too.
STUBBORN = (
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-S', '-c', "
    "'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    'print("ready", flush=True); time.sleep(600)\'], stdout=subprocess.PIPE)\n'
    "child.stdout.readline()\n"
    "write(me + '_child.pid', str(child.pid))\n"
)


def test_what_ignores_being_asked_is_killed_with_its_children(script, tmp_path):
    path = script(
        STUBBORN + "begun(4)\nif me == 'worker1': sys.exit(5)\ntime.sleep(600)\n"
    )
    start = time.monotonic()
    process = launch("--workers", "2", "--grace-seconds", "0.5", path)
    assert process.returncode == 5
    assert_gone(pids(tmp_path, 4))
    assert time.monotonic() - start < 30


def test_a_stopped_task_is_ended_too(script, tmp_path):
    path = script(
        "begun(2)\n"
        "if me == 'worker0': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while b'State:\\tT' not in pathlib.Path('/proc', "
        "(here / 'worker0.pid').read_text(), 'status').read_bytes(): "
        "time.sleep(0.01)\n"
        "sys.exit(6)\n"
    )
    process = launch("--workers", "2", "--grace-seconds", "0.5", path)
    assert process.returncode == 6
    assert_gone(pids(tmp_path, 2))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_launcher_reaches_every_task(script, tmp_path, number, code):
    path = script(
        "def clean(number, frame):\n"
        "    write(me + '.told', str(number))\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, clean)\n"
        "signal.signal(signal.SIGINT, clean)\n"
        "write(me + '.ready', '')\n"
        "time.sleep(600)\n"
    )
    with launched("--workers", "2", path) as process:
        wait_until(lambda: len(list(tmp_path.glob("*.ready"))) == 2, "all are ready")
        process.send_signal(number)
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == code
        assert f"[launch] {number.name}: ending all tasks." in errors
        told = [(tmp_path / f"worker{i}.told").read_text() for i in range(2)]
        assert told == [str(int(number))] * 2
        assert_gone(pids(tmp_path, 2))


def test_who_presses_ctrl_c_twice_does_not_wait(script, tmp_path):
    path = script(
        "signal.signal(signal.SIGINT, lambda *_: write(me + '.told', ''))\n"
        "write(me + '.ready', '')\n"
        "while True: time.sleep(600)\n"
    )
    with launched("--workers", "1", "--grace-seconds", "600", path) as process:
        wait_until((tmp_path / "worker0.ready").exists, "the task is ready")
        process.send_signal(signal.SIGINT)
        wait_until((tmp_path / "worker0.told").exists, "the task was told")
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 130


@pytest.mark.parametrize("whole_group", [False, True])
def test_nothing_outlives_a_launcher_that_is_killed(script, tmp_path, whole_group):
    path = script(STUBBORN + "time.sleep(600)\n")
    with launched("--workers", "2", path) as process:
        begun = pids(tmp_path, 4)
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == -signal.SIGKILL
        assert_gone(begun)


# --- Restarts -----------------------------------------------------------------


def test_a_cluster_that_failed_is_started_again_with_other_ports(script, tmp_path):
    path = script(
        "chief = here / 'worker0'\n"
        "if me == 'worker0':\n"
        "    with chief.open('a') as log: log.write(json.dumps(config) + '\\n')\n"
        "    if len(chief.read_text().splitlines()) < 3: sys.exit(3)\n"
        "while not chief.exists() or len(chief.read_text().splitlines()) < 3:\n"
        "    time.sleep(0.01)\n"
    )
    process = launch("--workers", "2", "--max-restarts", "2", path)
    assert process.returncode == 0
    restarts = re.findall(r"restarting \((.*)\)", process.stderr)
    assert restarts == ["1 of 2", "2 of 2"]
    configs = [json.loads(x) for x in (tmp_path / "worker0").read_text().splitlines()]
    assert len(configs) == 3
    assert len({json.dumps(config["cluster"]) for config in configs}) == 3


def test_a_signal_while_a_failed_cluster_is_ended_stops_the_restarts(script, tmp_path):
    path = script(
        "signal.signal(signal.SIGTERM, lambda *_: write(me + '.told', ''))\n"
        "write(me + '.ready', '')\n"
        "while len(list(here.glob('*.ready'))) < 2: time.sleep(0.01)\n"
        "if me == 'worker0': sys.exit(3)\n"
        # A signal just before a long sleep is handled at its end only.
        "while True: time.sleep(0.01)\n"
    )
    arguments = ("--workers", "2", "--max-restarts", "9", "--grace-seconds", "600")
    with launched(*arguments, path) as process:
        wait_until((tmp_path / "worker1.told").exists, "worker 1 is being ended")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=TIMEOUT)
        assert process.returncode == 143
        assert "restarting" not in errors


# --- Elastic workers ----------------------------------------------------------


@pytest.mark.slow(seconds=6)
def test_an_elastic_worker_that_is_lost_is_started_again(script, tmp_path):
    path = script(
        "(here / (me + '.log')).open('a').write(\n"
        "    json.dumps([os.environ['KS_ELASTIC'], config]) + '\\n')\n"
        "begun(3)\n"
        "write(f'{os.getpid()}.process', '')\n"
        "again = here / 'again'\n"
        "if me == 'worker1':\n"
        "    if again.exists():\n"
        "        write('back', '')\n"
        "        time.sleep(600)\n"
        "    again.touch()\n"
        "    subprocess.Popen([sys.executable, '-S', '-c', 'import time; "
        "time.sleep(600)'])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "while not (here / 'back').exists(): time.sleep(0.01)\n"
        # It began first, and may take longer than the grace period.
        "if me == 'worker0': time.sleep(2)\n"
        "write(me + '.done', '')\n"
    )
    process = launch("--elastic", "2:3", "--grace-seconds", "0.5", path)
    assert process.returncode == 0, process.stderr
    assert process.stderr.splitlines() == [
        "[launch] worker 1 was ended by SIGKILL; starting it again in 1 s (1 of 3)."
    ]
    first, second = (tmp_path / "worker1.log").read_text().splitlines()
    assert first == second
    assert json.loads(first)[0] == "2:3"
    assert len(json.loads(first)[1]["cluster"]["worker"]) == 3
    done = sorted(path.stem for path in tmp_path.glob("*.done"))
    assert done == ["worker0", "worker2"]
    assert_gone([int(path.stem) for path in tmp_path.glob("*.process")])


def test_elastic_workers_that_fail_again_and_again_end_all(script, tmp_path):
    path = script(
        "(here / me).open('a').write('.')\n"
        "if me != 'worker0': sys.exit(3)\n"
        "time.sleep(600)\n"
    )
    process = launch("--elastic", "2:3", "--max-restarts", "1", path)
    assert process.returncode == 3
    assert (tmp_path / "worker1").read_text() == ".."
    assert (tmp_path / "worker0").read_text() == "."
    assert "ended with exit code 3; it is not started again." in process.stderr
    assert "1 of at least 2 workers are left; ending them." in process.stderr
    assert_gone(pids(tmp_path, 3))


def test_a_signal_ends_elastic_workers_and_restarts(script, tmp_path):
    path = script("begun(2)\nif me == 'worker1': sys.exit(3)\ntime.sleep(600)\n")
    with launched("--elastic", "1:2", "--max-restarts", "99", path) as process:
        assert process.stderr is not None
        assert "starting it again" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT)
        assert process.returncode == 130
        assert_gone(pids(tmp_path, 2))


# --- Bad input ----------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--workers 0 FILE", "must be an int of 1 or more. Received: workers=0"),
        ("--workers 1 --ps -1 FILE", "`ps` must be an int of 0 or more"),
        ("--workers 1 there.py", "script 'there.py' not found"),
        ("--workers 1 --max-restarts -1 FILE", "-1 is below 0"),
        ("--workers 1 --grace-seconds x FILE", "invalid"),
        ("--workers 1", "required: SCRIPT"),
        ("FILE", "required: --workers or --elastic"),
        ("--elastic 2 FILE", "'2' is not MIN:MAX, such as 1:4"),
        ("--elastic 3:2 FILE", "'3:2' is not 1 <= MIN <= MAX"),
        (
            "--elastic 1:2 --workers 2 --ps 1 FILE",
            "no other tasks. Omit --workers and --ps.",
        ),
    ],
)
def test_arguments_that_cannot_be(arguments, message):
    process = launch(*(__file__ if x == "FILE" else x for x in arguments.split()))
    assert process.returncode == 2
    assert message in process.stderr
