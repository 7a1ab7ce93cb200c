"""`ks.verify_processes`: training functions of other frameworks against one device.

The processes are forks of a process that has imported the framework. By day one case
of each backend starts real ones, in `tests/tools/test_verify_command.py`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from verification import forked, keras_scripts, torch_scripts

import keras_strategies as ks
from keras_strategies.verification.processes import verify_processes
from keras_strategies.verification.processes.causes import Causes
from keras_strategies.verification.processes.comparison import Runs, differences
from keras_strategies.verification.processes.records import ProcessRecord, StepRecord

pytestmark = pytest.mark.one_backend

BACKEND = keras.backend.backend()
NIGHTLY = pytest.mark.nightly
of_torch = pytest.mark.skipif(BACKEND != "torch", reason="a script of Torch")

#: Mistakes in `torch_scripts`, their causes, and what differs at first.
PLANTED = {
    "scaled_rate": ("learning_rate_scaled", "setting"),
    "all_rows": ("data_depends_on_replicas", "batch"),
    "padded": ("data_depends_on_replicas", "batch"),
    "dropped": ("data_depends_on_replicas", "batch"),
    "batch_per_process": ("batch_size_per_replica", "batch"),
    "mean_of_means": ("mean_of_means", "gradient"),
    "same_masks": ("same_random_numbers", "mask"),
    "scaled_loss": ("scaled_by_replicas", "gradient"),
    "half_loss": ("scaled_by_replicas", "gradient"),
    "clipped": ("scaled_by_replicas", "gradient"),
    "left_out": ("variable_left_out", "gradient"),
    "own_log": ("one_replica_only", "metric"),
    "summed_log": ("scaled_by_replicas", "metric"),
    "batch_norm": ("mixes_rows", "output"),
    "bypassed": ("one_replica_only", "gradient"),
    "different_start": ("copies_differ", "copy"),
    "own_file": ("one_replica_only", "saved"),
}
BY_DAY = {"mean_of_means", "same_masks"}


@pytest.fixture(autouse=True)
def forks(monkeypatch) -> None:
    monkeypatch.setattr(verify_processes, "launch", forked.launch)


def _named(name: str, by_day: set[str]) -> Any:
    return pytest.param(name, marks=[] if name in by_day else [NIGHTLY])


@pytest.mark.one_backend("torch")
@of_torch
@pytest.mark.slow(seconds=10)
@pytest.mark.multiprocess
@pytest.mark.parametrize("fault", [_named(name, BY_DAY) for name in PLANTED])
def test_a_mistake_in_a_script_of_ddp_is_found_and_named(fault: str) -> None:
    report = ks.verify_processes(functools.partial(torch_scripts.train, fault))
    cause, kind = PLANTED[fault]
    assert (report.cause, report.first and report.first.kind) == (cause, kind), report
    assert report.advice in str(report)


@pytest.mark.one_backend("torch")
@of_torch
@pytest.mark.slow(seconds=10)
@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=NIGHTLY)])
def test_no_alarm_on_a_sound_script(kind: str, tmp_path: Path) -> None:
    """With dropout, momentum and an uneven last batch."""
    report = ks.verify_processes(functools.partial(torch_scripts.train, "", kind))
    assert report, report
    assert report.steps == 4
    report.save(tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["equal"] and found["versions"]["torch"]


@pytest.mark.one_backend("torch")
@of_torch
@NIGHTLY
@pytest.mark.multiprocess
def test_a_batch_size_of_each_process_is_multiplied_for_one() -> None:
    report = ks.verify_processes(torch_scripts.with_sampler)
    assert report, report
    assert "2 times as many rows" in report.notes[0]


@pytest.mark.one_backend("torch")
@of_torch
@NIGHTLY
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("", ""),
        ("scaled_rate", "learning_rate_scaled"),
        ("bare", "one_replica_only"),
    ],
)
@pytest.mark.parametrize(
    ("package", "train"),
    [
        ("accelerate", torch_scripts.of_accelerate),
        ("lightning_fabric", torch_scripts.of_fabric),
    ],
)
def test_a_script_of_a_trainer(
    package: str, train: Any, fault: str, cause: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    report = ks.verify_processes(functools.partial(train, fault))
    assert report.cause == cause, report


@pytest.mark.one_backend("jax")
@pytest.mark.skipif(BACKEND != "jax", reason="`keras.distribution` is one of JAX")
@NIGHTLY
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("", ""),
        ("dropout", ""),
        ("batch_norm", ""),
        ("scaled_rate", "learning_rate_scaled"),
    ],
)
def test_a_script_of_keras_distribution(fault: str, cause: str) -> None:
    train = functools.partial(keras_scripts.keras_distribution, fault)
    assert ks.verify_processes(train, 1, 2).cause == cause


@pytest.mark.one_backend("tensorflow")
@pytest.mark.skipif(BACKEND != "tensorflow", reason="`tf.distribute`")
@NIGHTLY
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("", ""),
        ("dropout", ""),
        ("batch_norm", "mixes_rows"),
        ("scaled_rate", "learning_rate_scaled"),
        ("clipped", "per_replica_function"),
        ("uneven", "mean_of_means"),
    ],
)
def test_a_script_of_tf_distribute(fault: str, cause: str) -> None:
    train = functools.partial(keras_scripts.tf_distribute, fault)
    report = ks.verify_processes(train, 1, 2)
    assert report.cause == cause, report


def test_a_loop_of_which_no_start_is_known_has_a_cause() -> None:
    """`ks.observe(model=model)` after a step is the first that is seen of a loop."""

    def record(weight: float) -> ProcessRecord:
        step = StepRecord(variables={"weight": np.array([weight])})
        return ProcessRecord(steps=[step])

    runs = Runs(record(1.0), [record(3.0)], 2e-5)
    found = [*differences(runs)]
    assert [each.kind for each in found] == ["variable"]
    assert Causes(runs, found).cause()[0] == "mean_of_means"


def nothing() -> None:
    """Trains nothing."""


def test_observe_does_nothing_elsewhere() -> None:
    ks.observe(loss=1.0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"train": 3}, "must be a function"),
        ({"processes": 0}, "`processes` of `verify_processes`"),
        ({"processes": 1}, "several processes or devices"),
        ({"steps": -1}, "0 or more"),
        ({"tolerance": 0.0}, "above 0"),
    ],
)
def test_bad_input_is_an_error_at_once(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ks.verify_processes(**{"train": nothing} | arguments)


@pytest.mark.multiprocess
@pytest.mark.slow(seconds=10)
def test_a_function_without_steps_is_an_error() -> None:
    with pytest.raises(ValueError, match="no step that can be observed"):
        ks.verify_processes(nothing, 1, 2)
