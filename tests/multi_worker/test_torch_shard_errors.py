"""Torch: errors and lost processes with weights in shards."""

from __future__ import annotations

import os
import signal
import time

import keras
import pytest
from harness.worker_pool import WorkerPool
from multi_worker.torch_shards import cut, fit, network

import keras_strategies as ks

if keras.backend.backend() != "torch":
    pytest.skip("shards of Torch", allow_module_level=True)


def test_what_cannot_be(cluster, tmp_path):
    def program(strategy, folder):
        own = cut()
        with pytest.raises(RuntimeError, match="needs its own process"):
            ks.ModelParallelStrategy("fsdp", ["cpu:0", "cpu:1"])
        model = network(own)
        with pytest.raises(ValueError, match="BackupAndRestore was given"):
            fit(model, [keras.callbacks.BackupAndRestore(folder)])
        return True

    assert cluster(program, str(tmp_path)) == [True, True]


class FailingModel(keras.Sequential):
    """Raises an error in the steps of one process."""

    fails = False

    def train_step(self, data):
        if self.fails:
            raise OSError("the disk is full")
        return super().train_step(data)


@pytest.mark.nightly(unless=["step-True"])
@pytest.mark.parametrize("is_sharded", [True, False])
@pytest.mark.parametrize("place", ["callback", "step"])
def test_an_error_in_one_process_is_named_in_the_others(forker, place, is_sharded):
    """Soon, although the process that has failed lives on.

    The others wait for the decisions of callbacks, or for a collective.
    """

    def program(strategy):
        index = strategy.workers.group.index

        class Failing(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if index == 1 and batch == 1:
                    if place == "callback":
                        raise OSError("the disk is full")
                    self.model.fails = True

        with (cut() if is_sharded else strategy).scope():
            model = FailingModel([keras.Input((8,)), keras.layers.Dense(4)])
            model.compile("sgd", "mse")
        fit(model)
        start = time.monotonic()
        with pytest.raises(OSError if index else ks.errors.WorkerError) as caught:
            fit(model, [Failing()])
        return str(caught.value), time.monotonic() - start

    # Processes of its own: the others' calls are not in step afterwards.
    pool = WorkerPool(forker, 2)
    try:
        (one, seconds), (other, _) = pool.cluster(1)(program)
    finally:
        pool.close()
    assert "the disk is full" in other
    assert "Worker 1" in one
    assert "the disk is full" in one
    # Their timeout is 60 seconds.
    assert seconds < 20


def test_an_error_in_all_processes_is_that_of_each(forker):
    def program(strategy):
        class Failing(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                group = strategy.workers.group
                if batch == 1:
                    if group.index == 1:
                        assert group.loss(wait=20) is not None
                    raise ks.errors.InputError("the same on all workers")

        fit(network(cut()), [Failing()])

    pool = WorkerPool(forker, 2)
    try:
        for error, _ in pool.cluster(1).outcomes(program):
            assert "InputError: the same on all workers" in error
            assert "WorkerError" not in error
    finally:
        pool.close()


def test_a_process_that_is_killed_is_named(forker, tmp_path):
    def program(strategy, path):
        index = strategy.workers.group.index

        class Killed(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if index == 1 and batch == 1:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            fit(network(cut()), [Killed()])
        except ks.errors.WorkerError as error:
            with open(path, "w") as file:
                file.write(str(error))

    pool = WorkerPool(forker, 2)
    try:
        with pytest.raises(AssertionError, match="Worker 1 died"):
            pool.cluster(1).outcomes(program, str(tmp_path / "error"))
    finally:
        pool.close()
    text = (tmp_path / "error").read_text()
    assert "Worker 1" in text
    assert "was lost" in text


def test_a_process_alone_is_told_how_to_start():
    with pytest.raises(RuntimeError, match="without a cluster") as caught:
        ks.ModelParallelStrategy("fsdp", ["cpu:0"])
    assert "keras-strategies launch --workers N" in str(caught.value)
