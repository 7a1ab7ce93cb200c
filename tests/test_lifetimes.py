"""Nothing remains of a strategy without references, as in a cell that is run again."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import psutil
import pytest
from keras import ops

import keras_strategies as ks

BACKEND = keras.backend.backend()
X = np.ones((8, 6), "float32")
Y = np.zeros((8, 3), "float32")
TWO = ["cpu:0", "cpu:1"]


def fitted(strategy: Any = None) -> list[Any]:
    hidden = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(3)])
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=4, verbose=0)
    model.evaluate(X, Y, batch_size=4, verbose=0)
    return [model] if strategy is None else [strategy, model]


def custom_loop() -> list[Any]:
    strategy = ks.MirroredStrategy(TWO)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.Mean()

    def loss_of(x: Any, y: Any) -> Any:
        return ops.sum(ops.square(model(x, training=True) - y)) / len(X)

    def on_replica(x: Any, y: Any) -> Any:
        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(loss_of, variables)(x, y)
        optimizer.apply(gradients, variables)
        metric.update_state(loss)
        return loss

    @ks.function
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("sum", strategy.run(on_replica, args=(x, y)))

    for x, y in strategy.experimental_distribute_dataset((X, Y), batch_size=4):
        step(x, y)
    return [strategy, model, optimizer]


RUNS: dict[str, Callable[[], list[Any]]] = {
    "mirrored": lambda: fitted(ks.MirroredStrategy(TWO)),
    "one_device": lambda: fitted(ks.OneDeviceStrategy("cpu:0")),
    "central": lambda: fitted(ks.CentralStorageStrategy(TWO, "cpu:0")),
    "custom_loop": custom_loop,
}
if BACKEND == "jax":
    RUNS["model_parallel"] = lambda: fitted(
        ks.ModelParallelStrategy("auto", TWO, 2, min_shard_bytes=0)
    )


def usage() -> tuple[int, int, float]:
    """What the process has: threads, file descriptors, megabytes."""
    gc.collect()
    process = psutil.Process()
    megabytes = process.memory_info().rss / 2**20
    return threading.active_count(), process.num_fds(), megabytes


def check_nothing_is_left(run: Callable[[], Any], times: int) -> tuple[float, float]:
    """Checks that objects are collected, and threads and files closed, after runs.

    A thread that ends may hold its last frame a little longer: ten seconds at most.

    Returns:
        Megabytes in use after the second run, and after the last.
    """
    references = []
    for i in range(times):
        references += [(type(made), weakref.ref(made)) for made in run()]
        if i == 1:
            first = usage()
    deadline = time.monotonic() + 10
    while True:
        last = usage()
        alive = [kind.__name__ for kind, made in references if made() is not None]
        if not alive and last[0] <= first[0] and last[1] <= first[1]:
            return first[2], last[2]
        assert time.monotonic() < deadline, (alive, first, last)
        time.sleep(0.1)


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["one_device"])
@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_left_of_a_strategy(name: str) -> None:
    check_nothing_is_left(RUNS[name], 3)


@pytest.mark.skipif(BACKEND != "torch", reason="replicas have threads on Torch only")
def test_threads_of_torch_do_not_wait_for_the_garbage_collector() -> None:
    run = RUNS["mirrored"]
    gc.disable()
    try:
        held = run()
        before = threading.active_count()
        held += run() + run()
        assert threading.active_count() == before
    finally:
        gc.enable()
    del held
    gc.collect()


@pytest.fixture(scope="module")
def megabytes_of_keras() -> float:
    """What thirty runs of plain Keras leave in use."""
    first, last = check_nothing_is_left(fitted, 30)
    return max(last - first, 0)


# Thirty programs are compiled on other backends.
@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["custom_loop"])
@pytest.mark.parametrize("name", ["mirrored", "custom_loop"])
def test_memory_of_thirty_runs(name: str, megabytes_of_keras: float) -> None:
    """Thirty runs need no more memory than thirty of plain Keras, within 60 MB."""
    first, last = check_nothing_is_left(RUNS[name], 30)
    assert last - first < megabytes_of_keras + 60
