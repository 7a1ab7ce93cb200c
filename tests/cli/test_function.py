"""`ks.launch`: a function on real worker processes."""

from __future__ import annotations

import os

import psutil
import pytest

import keras_strategies as ks

pytestmark = pytest.mark.multiprocess


def test_each_worker_returns_its_result_and_prints_with_its_name(capfd):
    secret = object  # A closure, as functions in notebooks have them.

    def who(first, second=0):
        assert secret is object
        resolver = ks.cluster_resolver.TFConfigClusterResolver()
        print("here is", resolver.task_id)
        return resolver.task_id, resolver.num_workers, first + second

    found = ks.launch(who, workers=3, args=(1,), kwargs={"second": 2})
    assert found == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]
    assert "[worker 1] here is 1" in capfd.readouterr().out


def test_an_error_of_a_worker_arrives_with_its_traceback():
    def fails():
        if ks.cluster_resolver.TFConfigClusterResolver().task_id == 1:
            raise KeyError("boom")
        import time

        time.sleep(600)

    with pytest.raises(KeyError, match="boom") as error:
        ks.launch(fails)
    (note,) = error.value.__notes__
    assert note.startswith("Raised in worker 1:")
    assert "in fails" in note
    assert not psutil.Process().children()


def test_a_worker_that_dies_is_named():
    def dies():
        os._exit(9)

    with pytest.raises(ks.errors.WorkerError, match="worker 0 ended with exit code 9"):
        ks.launch(dies, workers=1)


def test_each_worker_may_have_several_devices():
    def count():
        return ks.MirroredStrategy().num_replicas_in_sync

    assert ks.launch(count, workers=2, devices_per_worker=2) == [2, 2]


@pytest.mark.parametrize(
    "arguments, message",
    [((3,), "Received: 3"), ((print, 0), "Received: 0"), ((print, 1.5), "1.5")],
)
def test_what_cannot_be_launched(arguments, message):
    with pytest.raises(ValueError, match=message):
        ks.launch(*arguments)
