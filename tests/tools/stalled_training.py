"""Two workers train; one stalls at a step, in a way that the argument names.

`python stalled_training.py KIND FOLDER`; KIND "none" trains on. When it stalls, a file
`FOLDER/stalled` exists. Lines with the comment `# stalls` are those that `top` names.
Most stalls are in a batch that the loader reads, or in a callback.
"""

from __future__ import annotations

import fcntl
import gc
import itertools
import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np

import keras_strategies as ks

# Longer than the tests look.
LONG = 60.0
kind, folder = sys.argv[1], Path(sys.argv[2])
me = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
# The stalls of the chief; those of a file are where it writes.
late = 0 if kind in ("late_chief", "stop_chief") else 1


def begin() -> bool:
    """Whether this worker stalls, in the step after the twentieth."""
    if me != late and kind != "save":
        return False
    (folder / "stalled").touch()
    return True


def sleeps() -> None:
    time.sleep(LONG)  # stalls loader


def pipe() -> None:
    """A file that nobody writes, as on a disk that does not answer."""
    read, _ = os.pipe()
    os.read(read, 1)  # stalls pipe


def silent_host() -> None:
    """A server that accepts a connection and sends nothing."""
    one, other = socket.socketpair()
    one.recv(1)  # stalls socket
    other.close()


def empty_queue() -> None:
    """A thread that fills a queue has died."""
    queue.Queue().get(timeout=LONG)  # stalls queue


def busy_loader() -> None:
    all(True for _ in range(10**12))  # stalls busy_loader


def slow_pattern() -> None:
    """One call that holds the interpreter: no other thread runs."""
    re.match(r"(a+)+$", "a" * 60 + "b")


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire(timeout=LONG)  # stalls lock


def file_lock() -> None:
    """Another process, or another file of this one, has the lock."""
    with open(folder / "lock", "w") as one, open(folder / "lock", "w") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        fcntl.flock(other, fcntl.LOCK_EX)  # stalls file_lock


def thread() -> None:
    waits = threading.Thread(target=time.sleep, args=(LONG,), daemon=True)
    waits.start()
    waits.join()  # stalls thread


def program() -> None:
    subprocess.run(["sleep", str(LONG)])  # stalls program


def busy_callback() -> None:
    all(True for _ in range(10**12))  # stalls busy_callback


class Slow:
    """An object of which the garbage collector has much to do."""

    def __del__(self) -> None:
        time.sleep(LONG)  # stalls gc


def garbage() -> None:
    cycle = [Slow()]
    cycle.append(cycle)
    del cycle
    gc.collect()


#: Stalls in the twenty-first batch of the loader, and in the callback of that step.
LOADER: dict[str, Callable[[], None]] = {
    "loader": sleeps,
    "pipe": pipe,
    "socket": silent_host,
    "queue": empty_queue,
    "busy_loader": busy_loader,
    "pattern": slow_pattern,
}
CALLBACK: dict[str, Callable[[], None]] = {
    "lock": lock,
    "file_lock": file_lock,
    "thread": thread,
    "program": program,
    "busy_callback": busy_callback,
    "gc": garbage,
    "stop": lambda: time.sleep(1.0),
    "stop_chief": lambda: time.sleep(1.0),
}


class Stall(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if kind == "delay_callback" and me == late:
            if batch == 20:
                begin()
            time.sleep(0.1)  # stalls delay_callback
        if batch != 20:
            return
        if kind in CALLBACK and begin():
            CALLBACK[kind]()
        if kind == "save":
            self.model.save(folder / "model.keras")

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        if kind == "epoch" and begin():
            time.sleep(LONG)  # stalls epoch


def batches():
    rng = np.random.default_rng(0)
    for number in itertools.count():
        if kind == "first_batch" and number == 0 and begin():
            time.sleep(LONG)  # stalls first_batch
        if kind in LOADER and number == 20 and begin():
            LOADER[kind]()
        if kind == "delay" and me == late:
            if number == 20:
                begin()
            time.sleep(0.1)  # stalls delay
        rows = 16
        if kind == "shapes" and number == 20 and begin():
            rows = 12
        yield rng.random((rows, 8), "float32"), rng.random((rows, 1), "float32")


def loop(strategy: ks.Strategy, model: keras.Model) -> None:
    """A loop of one's own, which one worker leaves."""
    for number in range(100_000):
        if number == 20 and begin():
            break
        strategy.run(lambda: ks.get_replica_context().all_reduce("SUM", np.ones(3)))
    time.sleep(LONG)  # stalls left


def slow_write(*args: object, **kwargs: object) -> None:
    begin()
    time.sleep(LONG)  # stalls save


if kind == "save":
    zipfile.ZipFile.open = slow_write
strategy = ks.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
if kind == "outside" and begin():
    time.sleep(LONG)  # stalls outside
if kind == "late_chief" and begin():
    time.sleep(LONG)  # stalls late_chief
if kind == "left":
    loop(strategy, model)
steps = {"none": 200, "epoch": 20}.get(kind, 100_000)
model.fit(batches(), steps_per_epoch=steps, epochs=2, callbacks=[Stall()], verbose=2)
strategy.timeline().save(folder / f"run{me}.json")
