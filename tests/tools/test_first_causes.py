"""One worker fails, and ends the others: the launcher names the first one."""

from __future__ import annotations

import os
import re
import subprocess
import sys

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
                group.gather(f"step {step}", b"")
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


def group_script(folder, failure, body="train()\n", slow=1.0):
    path = folder / "script.py"
    code = GROUP.replace("FAILURE", failure).replace("SLOW", str(slow))
    path.write_text(code + body)
    return str(path)


@pytest.mark.parametrize("kind", FAILURES)
def test_the_first_failure_is_named_with_its_code_and_traceback(tmp_path, kind):
    failure, code, error = FAILURES[kind]
    path = group_script(tmp_path, failure)
    process = launch("--workers", "3", path)
    assert process.returncode == code, process.stderr
    lines = process.stderr.splitlines()
    ends = [line for line in lines if "ending the others" in line]
    own = 0 if kind == "end" else code
    assert len(ends) == 1, process.stderr
    assert ends[0].startswith(f"[launch] worker 1 ended with exit code {own}")
    assert "[launch] worker 1 failed first:" in lines
    assert lines[-1] == f"[launch] {error}"
    # The line of the script that failed.
    trace = lines[lines.index("[launch] worker 1 failed first:") :]
    assert f"[launch]     {failure}" in trace
    assert re.search(r"script\.py.*in fail$", "\n".join(trace), re.MULTILINE)
    assert "was lost" in process.stderr


def test_elastic_workers_end_with_the_first_failure(tmp_path):
    path = group_script(tmp_path, "raise ValueError('my bug')", slow=0.0)
    process = launch("--elastic", "2:2", "--max-restarts", "0", path)
    assert process.returncode == 1, process.stderr
    lines = process.stderr.splitlines()
    assert "[launch] worker 1 failed first:" in lines
    assert lines[-1] == "[launch] ValueError: my bug"


def test_an_error_between_the_calls_of_all_workers_is_named(tmp_path):
    body = "if index == 1: raise ValueError('between')\ntrain()\n"
    process = launch("--workers", "2", group_script(tmp_path, "pass", body))
    assert process.returncode == 1
    assert process.stderr.splitlines()[-1] == "[launch] ValueError: between"
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
    path = tmp_path / "script.py"
    code = GROUP.replace("FAILURE", "sys.exit(3)").replace("SLOW", "1.0")
    start = code.index("config =")
    end = code.index("group = ")
    address = "[f'127.0.0.1:{os.environ[\"MASTER_PORT\"]}'] * 2"
    code = (
        f"{code[:start]}index, addresses = int(os.environ['RANK']), {address}\n"
        f"{code[end:]}train()\n"
    )
    path.write_text(code.replace("timeout=20.0", "timeout=20.0, shares_port=True"))
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    process = subprocess.run(
        [*run, str(path)], capture_output=True, text=True, timeout=TIMEOUT
    )
    root = process.stderr.split("Root Cause")[-1]
    assert "rank      : 1 " in root, process.stderr
    assert "exitcode  : 3 " in root
    assert "SystemExit: 3" in root
