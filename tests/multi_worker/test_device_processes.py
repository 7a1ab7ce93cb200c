"""`MirroredStrategy` with a process for each device: scripts that are started again."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import keras
import pytest
from harness.devices import VARIABLE
from harness.processes import TIMEOUT, assert_gone
from harness.training import alone, assert_same
from multi_worker.worker_cases import WORKER_CASES

import keras_strategies as ks

BACKEND = keras.backend.backend()
TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.multiprocess
needs_torch = pytest.mark.skipif(BACKEND != "torch", reason="processes are for Torch")
#: Losses and statistics over the rows of all processes.
CASE = next(each.case for each in WORKER_CASES if each.case.name == "conv_bn")

#: Writes `NAME.pid`, and takes the number of its process from the strategy.
PRELUDE = """\
import json, os, pathlib, pickle, sys
from harness import devices
devices.install()
import keras, keras_strategies as ks
here = pathlib.Path(__file__).parent
(here / f"{os.getpid()}.pid").write_text("")
"""

TRAIN = """
from harness.training import train
from multi_worker.worker_cases import WORKER_CASES
[case] = [each.case for each in WORKER_CASES if each.case.name == sys.argv[1]]
os.chdir("/")
strategy = ks.MirroredStrategy()
index = strategy.cluster_resolver.task_id
print("the lines of process", index)
print("an error line of process", index, file=sys.stderr)
again = ks.MirroredStrategy()
facts = [str(device) for device in strategy.placement.replicas]
assert again.num_replicas_in_sync == strategy.num_replicas_in_sync == 2
(here / f"{index}.json").write_text(json.dumps(facts))
(here / f"{index}.results").write_bytes(pickle.dumps(train(case, strategy)))
for kwargs in ({"devices": ["gpu:1", "gpu:0"]}, {"processes": False}):
    try:
        ks.MirroredStrategy(**kwargs)
    except ks.errors.ClusterError as error:
        assert "one for each device of its first strategy" in str(error)
    else:
        raise AssertionError(kwargs)
"""


def run_script(
    folder: Path, body: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(PRELUDE + body)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", path.name, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    assert_gone([int(path.stem) for path in folder.glob("*.pid")])
    return done


@pytest.mark.slow(seconds=41)
@needs_torch
def test_a_script_trains_in_a_process_for_each_accelerator(tmp_path) -> None:
    done = run_script(tmp_path, TRAIN, CASE.name, **{VARIABLE: "simulated:2"})
    assert done.returncode == 0, done.stderr
    for index in range(2):
        # Each has one of the accelerators.
        facts = json.loads((tmp_path / f"{index}.json").read_text())
        assert facts == [f"gpu:{index}"]
        found = pickle.loads((tmp_path / f"{index}.results").read_bytes())
        assert_same(alone(CASE), found, CASE.tolerance, f"process {index}")
    assert "the lines of process 0" in done.stdout
    assert "the lines of process 1" not in done.stdout
    assert "[worker 1] an error line of process 1" in done.stderr


BOTH = """
def train(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        model.compile("adam", "mse")
    x = keras.random.normal((64, 8), seed=2)
    return model.fit(x, x[:, :2], epochs=2, verbose=0).history["loss"]

devices = ["cpu:0", "cpu:1"]
one = train(ks.MirroredStrategy(devices))
strategy = ks.ModelParallelStrategy("auto", devices, model_parallel=2)
index = strategy.cluster_resolver.task_id
(here / f"{index}.json").write_text(json.dumps([one, train(strategy)]))
"""


@pytest.mark.nightly
@needs_torch
def test_a_script_compares_a_strategy_of_one_process_with_one_of_several(
    tmp_path,
) -> None:
    """The processes that are started run the script from its beginning."""
    done = run_script(tmp_path, BOTH)
    assert done.returncode == 0, done.stderr
    for index in range(2):
        one, several = json.loads((tmp_path / f"{index}.json").read_text())
        assert several == pytest.approx(one, rel=1e-5)


FAILS = """
if "KS_DEVICE_PROCESS" in os.environ:
    raise ValueError("the other process cannot read its data")
ks.MirroredStrategy(["cpu:0", "cpu:1"], processes=True)
"""


@pytest.mark.nightly
@needs_torch
def test_a_process_that_fails_ends_the_others(tmp_path) -> None:
    done = run_script(tmp_path, FAILS)
    assert done.returncode == 1, done.stderr
    text = (
        "The process of worker 1, which runs this script for another device, ended "
        "with exit code 1 before it made the strategy. ValueError: the "
    )
    assert text in done.stderr


# Where no process can be started.

LAUNCHED = {
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}


@needs_torch
@pytest.mark.parametrize(
    ("devices", "processes", "environment", "text"),
    [
        (2, 2, {}, "`processes` must be True, for a process for"),
        (2, True, {}, r"`ks.launch\(train, workers=2\)`"),
        (1, True, {}, r"needs two devices or more\. Found: cpu:0"),
        (2, True, LAUNCHED, "a launcher has started this process as one"),
    ],
)
def test_processes_that_cannot_be(
    monkeypatch, devices, processes, environment, text
) -> None:
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=text):
        ks.MirroredStrategy([f"cpu:{i}" for i in range(devices)], processes=processes)


@pytest.mark.skipif(BACKEND == "torch", reason="the error of other backends")
def test_other_backends_need_no_processes() -> None:
    with pytest.raises(ks.errors.BackendError, match="one program computes the steps"):
        ks.MirroredStrategy(["cpu:0", "cpu:1"], processes=True)
