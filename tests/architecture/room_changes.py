"""Changes between `runtime/` and `engines/torch/` in one layer call on Torch.

    PYTHONPATH=tests KERAS_BACKEND=torch python tests/architecture/room_changes.py

A model is called on two replicas, and its gradient is computed; its row proof was found
in the step before. Printed are calls from a function of one folder to a function of the
other, each pair of functions once, in three kinds:

- changes of control: calls in which a function of the first folder is called again, so
  that one goes back and forth to follow the call;
- questions: calls that return without that;
- functions of tensors, devices and contexts, which say by their name what they do.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import numpy as np

import keras_strategies as ks

ROOT = str(Path(ks.__file__).parent) + "/"
ROOMS = ("runtime/", "engines/torch/")
#: The beginnings of modules and functions that are none of the call's own.
OF_TENSORS = (
    "engines/torch/compat:",
    "engines/torch/data_parallel/row_parts:",
    "engines/torch/devices:",
    "engines/torch/engine:",
    "engines/torch/tensor_primitives:",
    "runtime/context:",
    "runtime/frames:",
    "runtime/replica_context:",
    "runtime/data_parallel/row_parts:",
    "runtime/replicas/replica_set:",
    "runtime/replicas/tensor_primitives:",
    "runtime/row_splits:",
)


def room_of(frame: FrameType) -> str | None:
    """The folder of a function; None if it is in neither."""
    path = frame.f_code.co_filename
    if not path.startswith(ROOT):
        return None
    return next((room for room in ROOMS if path.startswith(ROOT + room)), None)


def name_of(frame: FrameType) -> str:
    module = frame.f_code.co_filename.removeprefix(ROOT).removesuffix(".py")
    return f"{module}:{frame.f_code.co_qualname.replace('.<locals>', '')}"


class Changes:
    """The calls from one folder to the other, while `is_recording`."""

    def __init__(self) -> None:
        self.is_recording = False
        #: By caller and callee, whether the callee calls the caller's folder again.
        self.found: dict[tuple[str, str], bool] = {}
        # The calls between folders that are open: of the main thread, and of others.
        self._open: list[tuple[FrameType, tuple[str, str]]] = []
        self._thread = threading.local()

    @contextlib.contextmanager
    def recorded(self, is_recording: bool) -> Iterator[None]:
        """Context in which calls are recorded, if `is_recording`."""
        self.is_recording = is_recording
        try:
            yield
        finally:
            self.is_recording = False

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """See `sys.setprofile`."""
        if not self.is_recording or event not in ("call", "return"):
            return
        room = room_of(frame)
        if room is None:
            return
        is_main = threading.current_thread() is threading.main_thread()
        of_thread = self._thread.__dict__.setdefault("open", [])
        stack = self._open if is_main else of_thread
        if event == "return":
            if stack and stack[-1][0] is frame:
                stack.pop()
            return
        caller = frame.f_back
        while caller is not None and room_of(caller) is None:
            caller = caller.f_back
        if caller is None or room_of(caller) == room:
            return
        pair = name_of(caller), name_of(frame)
        self.found.setdefault(pair, False)
        if not pair[1].startswith(OF_TENSORS):
            # Threads of replicas run in a call of the main thread.
            for _, outer in (*self._open, *of_thread):
                self.found[outer] = True
        stack.append((frame, pair))


def changes_of_a_call() -> Changes:
    """The changes in a call of a model of two layers and in its backward pass."""
    changes = Changes()

    class Model(keras.Sequential):
        is_known = False

        def train_step(self, data: Any) -> dict[str, Any]:
            with changes.recorded(self.is_known):
                outputs = self(data[0], training=True)
            loss = keras.ops.mean(outputs)
            with changes.recorded(self.is_known):
                loss.backward()
            return {"loss": loss}

    # Threads of replicas begin in the first step.
    threading.setprofile(changes.profile)
    sys.setprofile(changes.profile)
    try:
        ks.set_virtual_cpu_devices(2)
        with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            layers = [keras.layers.Dense(4, "relu"), keras.layers.Dense(2)]
            model = Model([keras.Input((3,)), *layers])
            model.compile("sgd", "mse")
        x, y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")
        model.train_on_batch(x, y)
        model.is_known = True
        model.train_on_batch(x, y)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return changes


def show(title: str, pairs: Iterable[tuple[str, str]]) -> None:
    found = list(pairs)
    print(f"{title}: {len(found)}")
    for caller, callee in found:
        print(f"  {caller} -> {callee}")


def main() -> None:
    found = changes_of_a_call().found
    own = [pair for pair in found if not pair[1].startswith(OF_TENSORS)]
    show("Changes of control", (pair for pair in own if found[pair]))
    show("Questions", (pair for pair in own if not found[pair]))
    show("Functions of tensors", (pair for pair in found if pair not in own))


if __name__ == "__main__":
    main()
