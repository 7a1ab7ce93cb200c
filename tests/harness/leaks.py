"""Leak police: threads, processes and settings that a test leaves behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import types
from dataclasses import dataclass

import keras
import psutil

import keras_strategies as ks
from harness import fork_server
from keras_strategies.keras_compat.models import layer_calls
from keras_strategies.keras_compat.thread_state import current_stateless_scope

# A thread that is ending gets this long; one that is not fails the test.
_GRACE_SECONDS = 5.0
# A strategy's replicas are kept for its next step, but have to be idle.
_POOL_THREADS = ("replica-",)
# What `torch.compile` leaves in a process, with or without a strategy.
_THREADS_OF_TORCH_COMPILE = ("tqdm_monitor",)
_ENVIRONMENT_OF_TORCH_COMPILE = ("_TORCHINDUCTOR_", "TORCHINDUCTOR_", "TRITON_")


@dataclass(frozen=True)
class Snapshot:
    """State of the process before and after a test."""

    threads: frozenset[threading.Thread]
    children: frozenset[int]
    environment: dict[str, str]
    policy: str

    @classmethod
    def take(cls) -> Snapshot:
        return cls(
            threads=frozenset(threading.enumerate()),
            children=frozenset(child.pid for child in psutil.Process().children()),
            environment=dict(os.environ),
            policy=keras.config.dtype_policy().name,
        )


def leaks(before: Snapshot) -> list[str]:
    """Leaks since `before`, each as a sentence."""
    found = [*_threads(before), *_children(before), *_environment(before)]
    if ks.has_strategy():
        found.append(f"the scope of {ks.get_strategy()!r} is still open")
    if keras.distribution.distribution() is not None:
        found.append("a keras.distribution is still set")
    if current_stateless_scope() is not None:
        found.append("a keras.StatelessScope is still open")
    if layer_calls.thread_route.call is not None:
        found.append("layer calls of this thread still go to a strategy")
    if (policy := keras.config.dtype_policy().name) != before.policy:
        found.append(f"the dtype policy is {policy!r}, and was {before.policy!r}")
    return found


def mend(before: Snapshot) -> None:
    """Undoes a test's leaks, so that the next test does not fail by them."""
    if ks.has_strategy():
        from keras_strategies.runtime import context

        context._thread.frames.clear()
    keras.config.set_dtype_policy(before.policy)
    keras.distribution.set_distribution(None)
    layer_calls.thread_route.call = None
    os.environ.clear()
    os.environ.update(before.environment)


def _threads(before: Snapshot) -> list[str]:
    found = []
    new = []
    for thread in set(threading.enumerate()) - before.threads:
        if not thread.name.startswith(_POOL_THREADS):
            new.append(thread)
        elif not _is_idle(thread):
            found.append(f"the replica thread {thread.name!r} is still busy")
    new = [thread for thread in new if not _is_expected(thread)]
    if new:
        # Keras's threads for callbacks end with a `fit` that has failed, which the
        # traceback of its error holds in a cycle. This takes as long as a small test,
        # so it is not done for the threads above, which are there after most tests.
        gc.collect()
    for thread in new:
        # One that another thread is starting cannot be joined yet.
        until = time.monotonic() + _GRACE_SECONDS
        while thread.ident is None and time.monotonic() < until:
            time.sleep(0.01)
        thread.join(_GRACE_SECONDS)
        if thread.is_alive():
            found.append(f"the thread {thread.name!r} is still running")
    return found


def _is_expected(thread: threading.Thread) -> bool:
    return (
        thread is threading.current_thread()
        # Of TensorFlow's runtime, which has called Python.
        or isinstance(thread, threading._DummyThread)
        or thread.name in _THREADS_OF_TORCH_COMPILE
        # ZeroMQ's one collector of sent memory, for the whole process.
        or type(thread).__module__.startswith("zmq.")
    )


def _is_idle(thread: threading.Thread) -> bool:
    """Whether a thread of a pool waits for its next task."""
    frame: types.FrameType | None = sys._current_frames().get(thread.ident or 0)
    return frame is None or frame.f_code.co_name == "_worker"


def _children(before: Snapshot) -> list[str]:
    # These serve the whole session.
    known = before.children | fork_server.pids()
    new = [c for c in psutil.Process().children() if c.pid not in known]
    _, alive = psutil.wait_procs(new, timeout=_GRACE_SECONDS if new else 0)
    return [f"the process {child.pid} is still running" for child in alive]


def _environment(before: Snapshot) -> list[str]:
    found = []
    for name in sorted(before.environment.keys() | os.environ.keys()):
        # pytest writes the name of the current test, scikit-learn what OpenMP is to do
        # when it is first imported.
        if name.startswith(("PYTEST_", "KMP_", *_ENVIRONMENT_OF_TORCH_COMPILE)):
            continue
        old, new = before.environment.get(name), os.environ.get(name)
        if old != new:
            found.append(f"os.environ[{name!r}] is {new!r}, and was {old!r}")
    return found
