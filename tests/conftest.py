"""One process tests one backend, `KERAS_BACKEND`, on four virtual CPU devices."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Otherwise torch.compile starts a pool of threads and processes for the whole run.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import keras
import pytest
from harness import devices, fork_server, leaks, marks
from harness.forker import Forker
from harness.strategies import STRATEGIES, StrategyCase

import keras_strategies as ks
from keras_strategies import engines
from keras_strategies.timeline import recording

keras.config.disable_traceback_filtering()
devices.install()
# Its engine is the tests' own.
engines.ENGINES["numpy"] = "backends.numpy_engine:NumpyEngine"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # So do shells begin what they run in the background; tests press Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What has been imported stays: no search for garbage has to go through it.
gc.collect()
gc.freeze()
# Tracing makes millions of objects and little garbage; tests that look for what is left
# collect it themselves.
gc.set_threshold(100_000, 20, 20)


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    # Before pytest takes those without wanted marks away.
    marks.apply(config, items, keras.backend.backend())


@pytest.fixture(scope="session", autouse=True)
def four_cpu_devices() -> None:
    """Before the first test, because a backend in use has fixed its devices."""
    ks.set_virtual_cpu_devices(4)


@pytest.fixture(autouse=True)
def gpu_or_skip(request, four_cpu_devices) -> None:
    """Skips tests marked `gpu` where the backend sees none."""
    if request.node.get_closest_marker("gpu") is None:
        return
    kinds = {device.kind for device in engines.get_engine().local_devices()}
    if "gpu" not in kinds:
        pytest.skip(f"needs a GPU; {keras.backend.backend()} sees none")


@pytest.fixture(scope="session", autouse=True)
def fork_servers():
    """Started by the first test that forks a script, where `tests/run.py` has none."""
    yield
    fork_server.close()


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Starts scripts in processes that have imported Keras already."""
    with Forker() as forker:
        yield forker


@pytest.fixture(scope="session", autouse=True)
def recorder() -> None:
    """Before the first test, because its thread ends with the process."""
    recording.start()


@pytest.fixture(autouse=True)
def seeds() -> None:
    keras.utils.set_random_seed(20240229)


@pytest.fixture(autouse=True)
def leak_police(four_cpu_devices, seeds):
    """Fails a test that leaves threads, processes, scopes or variables behind."""
    before = leaks.Snapshot.take()
    yield
    found = leaks.leaks(before)
    if found:
        leaks.mend(before)
        pytest.fail("This test left something behind: " + "; ".join(found) + ".")


@pytest.fixture(scope="session")
def backend_name() -> str:
    return keras.backend.backend()


@pytest.fixture(params=STRATEGIES.values(), ids=lambda case: case.name)
def strategy_case(request) -> StrategyCase:
    return request.param


@pytest.fixture
def strategy(strategy_case):
    """Each of the strategies in turn."""
    return strategy_case.make()


@pytest.fixture
def mirrored():
    """Two replicas, for tests that would say the same of every strategy."""
    return STRATEGIES["mirrored_2"].make()
