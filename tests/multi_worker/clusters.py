"""The clusters of these tests, by name, and what programs of workers share."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import pytest
from harness.forker import Forker
from harness.training import Results, assert_workers
from harness.worker_pool import Cluster, WorkerPool

import keras_strategies as ks

#: Workers, and devices of each. The first two have the same processes.
CLUSTERS = {"two": (2, 1), "two_by_two": (2, 2), "three": (3, 1), "four": (4, 1)}
DEVICES = {2: 2, 3: 1, 4: 1}


def on_clusters(*names: str) -> pytest.MarkDecorator:
    """Runs a test on each of these clusters."""
    return pytest.mark.parametrize("cluster", names, indirect=True, scope="session")


ALL = on_clusters("two", "three", "two_by_two")


def with_clusters(names: str, cases: Any) -> pytest.MarkDecorator:
    """Runs a test with each of these values, of which one names the cluster."""
    return pytest.mark.parametrize(
        names.split(), cases, indirect=["cluster"], scope="session"
    )


@contextlib.contextmanager
def own_cluster(forker: Forker, workers: int = 2) -> Iterator[Cluster]:
    """Processes of a test's own: after an error they train together no more."""
    pool = WorkerPool(forker, workers)
    try:
        yield pool.cluster(1)
    finally:
        pool.close()


def one_device() -> ks.OneDeviceStrategy:
    return ks.OneDeviceStrategy("cpu:0")


def model_parallel(
    layout_map: Any = "fsdp", width: int = 1, strategy: Any = None
) -> Any:
    """The grid of one device of each worker, or of all that a strategy has."""
    devices = ["cpu:0"]
    if strategy is not None:
        devices = [str(device) for device in strategy.placement.replicas]
    return ks.ModelParallelStrategy(layout_map, devices, width, min_shard_bytes=0)


def scope_of(strategy: Any) -> Any:
    """The scope of a strategy, if there is one."""
    return contextlib.nullcontext() if strategy is None else strategy.scope()


def dense(
    strategy: Any,
    width: int,
    layers: Callable[[], list[Any]],
    optimizer: Callable[[], Any] = lambda: "sgd",
    seed: int = 5,
    **options: Any,
) -> keras.Model:
    """A compiled model of layers, all made in the scope of a strategy."""
    keras.utils.set_random_seed(seed)
    with scope_of(strategy):
        model = keras.Sequential([keras.Input((width,)), *layers()])
        model.compile(optimizer(), **{"loss": "mse", **options})
    return model


def assert_as_one_device(
    cluster: Cluster, program: Any, *arguments: Any, tolerance: float = 1e-5
) -> Results:
    """Fails where workers have other results than one device, which it returns."""
    expected = program(one_device(), *arguments)
    assert_workers(expected, cluster(program, *arguments), tolerance)
    return expected


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What is said meanwhile of the rows that a worker reads."""
    said: list[str] = []
    logger, handler = logging.getLogger("keras_strategies.own_rows"), logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
