"""One worker fails, and ends the others: the launcher names the first one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from harness.processes import TIMEOUT, launch

import keras_strategies as ks

pytestmark = [
    pytest.mark.one_backend("jax"),
    pytest.mark.multiprocess,
    pytest.mark.skipif(os.name != "posix", reason="process groups are POSIX"),
]

# Workers of a group, without a framework, that exchange values until one fails.
GROUP = """\
import atexit, json, os, sys, time
from keras_strategies.cluster.group import WorkerGroup, uncaught_errors

config = json.loads(os.environ["TF_CONFIG"])
index, addresses = config["task"]["index"], config["cluster"]["worker"]
group = WorkerGroup.join(addresses, index, {}, timeout=20.0)
# Slower to end than those that it takes along, as a process with a framework.
def end():
    uncaught_errors.at_exit(group)
    time.sleep(SLOW if index == 1 else 0)
    group.leave()
atexit.register(end)
def fail():
    FAILURE
def train():
    with group.call():
        try:
            for step in range(50):
                if index == 1 and step == 3:
                    fail()
                group.barrier(f"step {step}")
        except BaseException as error:
            if "WorkerError" not in type(error).__name__:
                uncaught_errors.report(group, error)
            raise
"""
FAILURES = {
    "raise": ("raise ValueError('my bug')", 1, "ValueError: my bug"),
    "exit": ("sys.exit(3)", 3, "SystemExit: 3"),
    # Its exit code says nothing.
    "end": ("sys.exit()", 1, "SystemExit"),
}


def written(folder, code):
    path = folder / "script.py"
    path.write_text(code)
    return str(path)


def group_script(folder, failure, body="train()\n", slow=1.0):
    code = GROUP.replace("FAILURE", failure).replace("SLOW", str(slow))
    return written(folder, code + body)


@pytest.mark.parametrize("kind", FAILURES)
def test_the_first_failure_is_named_with_its_code_and_traceback(tmp_path, kind):
    failure, code, error = FAILURES[kind]
    process = launch("--workers", "3", group_script(tmp_path, failure))
    assert process.returncode == code, process.stderr
    lines = process.stderr.splitlines()
    ends = [line for line in lines if "ending the others" in line]
    own = 0 if kind == "end" else code
    assert len(ends) == 1, process.stderr
    assert ends[0].startswith(f"[launch] worker 1 ended with exit code {own}")
    assert "[launch] worker 1 failed first:" in lines
    assert lines[-1] == f"[worker 1] {error}"
    # The line of the script that failed.
    trace = lines[lines.index("[launch] worker 1 failed first:") :]
    assert f"[worker 1]     {failure}" in trace
    assert re.search(r"script\.py.*in fail$", "\n".join(trace), re.MULTILINE)
    assert "was lost" in process.stderr


def test_elastic_workers_end_with_the_first_failure(tmp_path):
    path = group_script(tmp_path, "raise ValueError('my bug')", slow=0.0)
    process = launch("--elastic", "2:2", "--max-restarts", "0", path)
    assert process.returncode == 1, process.stderr
    lines = process.stderr.splitlines()
    assert "[launch] worker 1 failed first:" in lines
    assert lines[-1] == "[worker 1] ValueError: my bug"


def test_an_error_between_the_calls_of_all_workers_is_named(tmp_path):
    body = "if index == 1: raise ValueError('between')\ntrain()\n"
    process = launch("--workers", "2", group_script(tmp_path, "pass", body))
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "[worker 1] ValueError: between"
    # The other worker has it, too.
    assert "was lost: ValueError: between." in process.stderr


@pytest.mark.slow(seconds=9)
def test_launched_functions_raise_the_first_error():
    pytest.importorskip("cloudpickle")

    def train():
        import keras
        import numpy as np

        import keras_strategies as ks

        strategy = ks.MultiWorkerMirroredStrategy()
        index = strategy.cluster_resolver.task_id

        class Fails(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if index == 1 and batch == 1:
                    raise ValueError("my bug")

        x = np.ones((32, 2), "float32")
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(x, x[:, :1], batch_size=8, callbacks=[Fails()], verbose=0)

    # Also of a worker that the engine's collectives end, as on JAX.
    with pytest.raises(ValueError, match="my bug"):
        ks.launch(train, workers=2, timeout_seconds=TIMEOUT)


@pytest.mark.skipif(
    keras.backend.backend() != "torch", reason="torchrun is a program of Torch"
)
def test_torchrun_names_the_root_cause(tmp_path):
    path = Path(group_script(tmp_path, "sys.exit(3)"))
    code = path.read_text().replace("timeout=20.0", "timeout=20.0, shares_port=True")
    start, end = code.index("config ="), code.index("group = ")
    address = "[f'127.0.0.1:{os.environ[\"MASTER_PORT\"]}'] * 2"
    place = f"index, addresses = int(os.environ['RANK']), {address}\n"
    path.write_text(code[:start] + place + code[end:])
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    run.append(str(path))
    process = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT)
    root = process.stderr.split("Root Cause")[-1]
    assert "rank      : 1 " in root, process.stderr
    assert "exitcode  : 3 " in root
    assert "SystemExit: 3" in root


def tracebacks(process):
    """The labels of printed tracebacks, with the error of each."""
    found = re.findall(
        r"^\[(.*)\] Traceback.*\n(?:\[\1\]  .*\n)+\[\1\] (.*)$", process.stderr, re.M
    )
    assert len(found) == process.stderr.count("Traceback (most recent")
    return found


EQUAL = """\
import os, json, pathlib, sys, time
index = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def ready(name):
    (pathlib.Path(__file__).parent / f"{name}{index}").touch()
    while len(list(pathlib.Path(__file__).parent.glob(f"{name}?"))) < 4:
        time.sleep(0.01)
ready("begun")
"""
BUG = EQUAL + "raise ValueError('a bug of all')\n"


def test_an_error_of_all_workers_is_printed_once(tmp_path):
    process = launch("--workers", "4", written(tmp_path, BUG))
    assert process.returncode == 1
    [(label, error)] = tracebacks(process)
    # Those that the launcher has ended before they failed are not named.
    assert re.fullmatch(r"workers? [\d, -]+", label)
    assert error == "ValueError: a bug of all"
    assert "different tracebacks" not in process.stderr


def test_tracebacks_that_differ_are_in_files(tmp_path):
    # They ignore being ended, so that all have the error.
    body = (
        "import signal\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "ready('ignores')\n"
        "def odd(): raise ValueError('a bug of all')\n"
        "def even(): raise ValueError('a bug of all')\n"
        "odd() if index % 2 else even()\n"
    )
    path = written(tmp_path, EQUAL + body)
    process = launch("--workers", "4", path, TMPDIR=str(tmp_path))
    assert tracebacks(process) == [("workers 0-3", "ValueError: a bug of all")]
    [folder] = re.findall(r"different tracebacks.* all are in (.*)$", process.stderr)
    for index in range(4):
        text = (tmp_path / folder / f"worker-{index}.txt").read_text()
        assert ("in odd" if index % 2 else "in even") in text
        assert text.endswith("ValueError: a bug of all\n")


def test_elastic_workers_print_an_error_once(tmp_path):
    path = written(tmp_path, BUG)
    process = launch("--elastic", "1:4", "--max-restarts", "1", path)
    assert process.returncode == 1
    found = tracebacks(process)
    # Before the first restart, and as the last lines.
    assert [error for _, error in found] == ["ValueError: a bug of all"] * 2
    # The four processes and their restarts.
    assert process.stderr.count("] ValueError: a bug of all\n") >= 8


@pytest.mark.parametrize("seconds", [0, pytest.param(8, marks=pytest.mark.nightly)])
def test_a_traceback_of_a_task_that_goes_on_is_printed(tmp_path, seconds):
    path = written(
        tmp_path,
        "import sys, time, traceback\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: traceback.print_exc()\n"
        f"time.sleep({seconds})\n"
        "print('after', file=sys.stderr)\n",
    )
    process = launch("--workers", "1", path)
    assert process.returncode == 0
    assert len(tracebacks(process)) == 1
    assert process.stderr.endswith("[worker 0] after\n")
