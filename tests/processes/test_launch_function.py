"""`ks.launch`: a function on real worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from harness import fork_server
from harness.processes import assert_gone, pids, wait_until

import keras_strategies as ks

pytestmark = [pytest.mark.one_backend("jax"), pytest.mark.multiprocess]


def new_children() -> list[psutil.Process]:
    """Children besides those that fork scripts for other tests."""
    known = fork_server.pids()
    return [one for one in psutil.Process().children() if one.pid not in known]


def own_task() -> tuple[int, int]:
    resolver = ks.cluster_resolver.TFConfigClusterResolver()
    return resolver.task_id, resolver.num_workers


def test_each_worker_returns_its_result_and_prints_with_its_name(capsys):
    secret = object  # A closure, as functions in notebooks have them.

    def who(first, second=0):
        assert secret is object
        print("here is", own_task()[0])
        return (*own_task(), first + second)

    found = ks.launch(who, workers=3, args=(1,), kwargs={"second": 2})
    assert found == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == [f"[worker {i}] here is {i}" for i in range(3)]
    assert not new_children()


def test_an_error_of_a_worker_arrives_with_its_traceback():
    class Odd(Exception):
        pass

    def fails():
        if own_task()[0] == 1:
            raise Odd("boom")
        time.sleep(600)

    with pytest.raises(Exception, match="boom") as error:
        ks.launch(fails)
    assert type(error.value).__name__ == "Odd"
    (note,) = error.value.__notes__
    assert note.startswith("Raised in worker 1:")
    assert "in fails" in note
    assert not new_children()


@pytest.mark.parametrize(
    "end, message",
    [
        (lambda: os._exit(9), "worker 0 ended with exit code 9 before"),
        (lambda: os.kill(os.getpid(), 9), "worker 0 was ended by SIGKILL before"),
        (threading.Lock, "a lock, which cannot be sent"),
    ],
)
def test_a_worker_without_a_result_is_named(end, message):
    with pytest.raises(ks.errors.WorkerError, match=message):
        ks.launch(end, workers=1)


def test_sys_exit_in_a_function_is_an_error_with_its_place():
    def leaves():
        sys.exit(0)

    with pytest.raises(ks.errors.WorkerError) as error:
        ks.launch(leaves, workers=1)
    assert "in leaves" in error.value.__notes__[0]
    assert "SystemExit: 0" in error.value.__notes__[0]


@pytest.mark.slow(seconds=5)
def test_after_the_timeout_it_says_who_was_not_ready(tmp_path):
    def waits(folder):
        if own_task()[0] == 1:
            time.sleep(600)

    start, text = time.monotonic(), r"^worker 1 had not returned after 5 seconds"
    with pytest.raises(ks.errors.WorkerError, match=text):
        ks.launch(waits, 2, (str(tmp_path),), timeout_seconds=5)
    assert time.monotonic() - start < 30
    assert not new_children()


NOTEBOOK = """
import pathlib, signal, subprocess, sys, os, time
import keras_strategies as ks

def task(folder):
    me = ks.cluster_resolver.TFConfigClusterResolver().task_id
    sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(sleep)
    for name, number in (("", os.getpid()), ("_child", child.pid)):
        part = pathlib.Path(folder, f"worker{me}{name}.part")
        part.write_text(str(number))
        part.rename(pathlib.Path(folder, f"worker{me}{name}.pid"))
    time.sleep(600)

if __name__ == "__main__":
    # Where it was ignored before Python started, as in the background of a script.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ks.launch(task, workers=2, args=(sys.argv[1],))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_outlives_a_process_that_launches(tmp_path, number):
    # The function is defined in `__main__`, as in a notebook.
    command = [sys.executable, "-c", NOTEBOOK, str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    try:
        begun = pids(tmp_path, 4)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert_gone(begun)
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in errors
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((3,), "Received: 3"),
        ((print, 0), "`workers` must be an int of 1 or more. Received: workers=0"),
        ((print, 1.5), "Received: workers=1.5"),
        ((print, 1, (), None, 0), "`devices_per_worker` must be an int"),
    ],
)
def test_what_cannot_be_launched(arguments, message):
    with pytest.raises(ValueError, match=message):
        ks.launch(*arguments)
    with pytest.raises(ValueError, match=r"above 0, or None.*timeout_seconds=-1"):
        ks.launch(print, timeout_seconds=-1)
    wait_until(lambda: not new_children(), "no process is left")
