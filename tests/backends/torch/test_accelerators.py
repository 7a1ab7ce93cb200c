"""Torch on several accelerators of one process: those of GPUs, or simulated ones."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest
import torch
from harness.devices import VARIABLE
from harness.forker import Forker
from harness.marks import ROTATION
from harness.training import alone, assert_same, train
from harness.worker_pool import WorkerPool
from multi_worker.worker_cases import WORKER_CASES

import keras_strategies as ks
from keras_strategies.engines.torch.nccl_works import check_own_gpus

TESTS = Path(__file__).parents[2]
PYTEST = TESTS / "harness" / "pytest_process.py"


def exactness(*cases: str) -> tuple[str, ...]:
    return tuple(
        f"exactness/test_exactness.py::test_same_as_one_device[{case}]"
        for case in cases
    )


#: On one GPU, of which the simulated ones say nothing new.
ON_ONE = exactness(
    "structures-one_device",
    "masked_tagger-one_device",
    "stateful_layers-default_options",
    "custom_steps-default_options",
    "conv_bn-default_options",
    "steps_per_execution_bn_weights-one_device",
    "mixed_float16_skips-default_options",
    "transformer-default_options",
)
#: By the number of accelerators and what is different with their memory and threads.
SUITES = {
    (2, "fit"): (
        *exactness(
            "structures-mirrored_2",  # Several inputs and outputs.
            "masked_tagger-mirrored_2",  # Masks and weights of rows.
            "penalties-mirrored_2",  # Losses that layers add, and a last odd batch.
            "stateful_layers-mirrored_2",
            "custom_steps-mirrored_2",
            "custom_step_two_players-mirrored_2",
            "conv_bn-mirrored_2",
            "global_clipnorm_accumulation_ema-mirrored_2",
            "global_clipnorm_accumulation_ema-central",
            "steps_per_execution_bn_weights-central",
            "on_batch-central",
            "mixed_float16_skips-central",
            "mixed_bfloat16-mirrored_2",
        ),
        "backends/torch/test_accelerator_threads.py",
        "exactness/test_exactness.py::test_dropout_is_that_of_one_device[mirrored_2]",
        "custom_loops/test_torch.py::"
        "test_replicas_differ_where_a_function_first_draws_in_a_later_call",
    ),
    (2, "loops"): (
        "custom_loops/test_optimizers.py",
        "custom_loops/test_run.py",
        "custom_loops/test_training.py",
        "test_model_integration.py::test_central_storage_keeps_one_copy_of_everything",
        "test_model_integration.py::"
        "test_a_saved_model_opens_with_and_without_a_strategy[mirrored_2]",
    ),
    (4, "parts"): (
        *exactness(
            "conv_bn-one_device",
            "conv_bn-default_options",  # evaluate and predict, too.
            "sizes-mirrored_4",  # Uneven parts and replicas without rows.
            "mixed_float16_skips-mirrored_4",
        ),
        "custom_loops/test_training.py::"
        "test_the_portable_loop_equals_one_device[mirrored_4-35-16-False]",
    ),
}
#: GPUs round factors of products and convolutions to TensorFloat-32 otherwise.
EXACT_PRODUCTS = {"NVIDIA_TF32_OVERRIDE": "0"}
#: A test about devices by name.
NAMES = "devices_are_those_of_the_replica"


def run_suite(folder: Path, devices: str, suite: tuple[str, ...]) -> None:
    """Runs tests in a process with devices of `harness.devices`."""
    files = [str(TESTS / name) for name in suite]
    left_out = NAMES if len(suite) < 9 else f"{NAMES} or mirrored_4"
    marks = ["-m", "not nightly and not gpu", "-k", f"not ({left_out})"]
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={TESTS.parent}"]
    # A backward pass that waits for itself ends with the stacks of all threads.
    options += ["-o", "faulthandler_timeout=60", "-o", "faulthandler_exit_on_timeout=1"]
    with Forker("torch", imports_strategies=True) as forker:
        # The tests that are named run here on any day.
        environment = {VARIABLE: devices, "OMP_NUM_THREADS": "1", ROTATION: ""}
        given = (str(PYTEST), *options, *marks, *files)
        log = folder / "pytest.log"
        process = forker.start(log, *given, **environment, **EXACT_PRODUCTS)
        code, _ = process.wait(600)
    text = process.text()
    assert code == 0, text[-10_000:]
    passed = re.search(r"(\d+) passed", text)
    assert passed is not None and int(passed[1]) >= len(suite), text[-2000:]


@pytest.mark.slow(seconds=25)
@pytest.mark.nightly(unless=["2-fit"])
@pytest.mark.parametrize(("count", "of"), SUITES)
def test_strategies_on_simulated_accelerators(tmp_path, count: int, of: str) -> None:
    run_suite(tmp_path, f"simulated:{count}", SUITES[count, of])


#: Statistics of batches, and losses that layers add, over all of their devices.
WORKERS = ("conv_bn", "two_losses_and_a_penalty")


@pytest.mark.slow(seconds=13)
def test_two_workers_with_two_simulated_accelerators_each() -> None:
    with cluster(2, "simulated") as workers:
        for name in WORKERS:
            assert_trains_as_one_device(workers, name)


@contextlib.contextmanager
def cluster(devices: int, *options: str):
    """Two workers."""
    with (
        Forker("torch") as forker,
        contextlib.closing(WorkerPool(forker, 2, devices, *options)) as pool,
    ):
        yield pool.cluster(devices)


def assert_trains_as_one_device(workers, name: str) -> None:
    [case] = [each.case for each in WORKER_CASES if each.case.name == name]
    for found in workers(train_on_workers, name):
        assert_same(alone(case), found, case.tolerance, name)


@pytest.fixture
def sharing_workers(request, monkeypatch):
    """Two workers on the first GPU."""
    for name, value in EXACT_PRODUCTS.items():
        monkeypatch.setenv(name, value)  # For the reference.
    with cluster(1, "gpu", request.param) as workers:
        yield workers


@pytest.mark.gpu
@pytest.mark.parametrize("sharing_workers", ["RING"], indirect=True)
@pytest.mark.parametrize("name", WORKERS)
def test_two_workers_share_a_gpu_by_gloo(sharing_workers, name: str) -> None:
    assert_trains_as_one_device(sharing_workers, name)


@pytest.mark.gpu
@pytest.mark.parametrize("sharing_workers", ["AUTO"], indirect=True)
def test_two_workers_cannot_share_a_gpu_by_nccl(sharing_workers) -> None:
    for error, _ in sharing_workers.outcomes(train_on_workers, WORKERS[0]):
        assert re.search(r"Workers 0, 1 all compute on the GPU \S+, and NCCL", error)


@pytest.mark.parametrize("uuids", [["a", "b", "a"], ["a", "", "a"]])
def test_workers_that_share_a_gpu_are_named(uuids) -> None:
    check_own_gpus(["a", "b", "", ""])
    with pytest.raises(ks.errors.ClusterError, match=r"Workers 0, 2 all .* GPU a,"):
        check_own_gpus(uuids)


def train_on_workers(strategy, name: str):
    from multi_worker.worker_cases import WORKER_CASES

    assert {device.kind for device in strategy.placement.replicas} == {"gpu"}
    [case] = [each.case for each in WORKER_CASES if each.case.name == name]
    return train(case, strategy)


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "of"), [(1, "fit"), *SUITES])
def test_strategies_on_gpus(tmp_path, count: int, of: str) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    run_suite(tmp_path, f"gpu:{count}", SUITES.get((count, of), ON_ONE))
