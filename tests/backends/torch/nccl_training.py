"""A training on `nccl_double`, one worker of which is killed in a backward pass.

    python nccl_training.py FOLDER INDEX [elastic | counts]

Index -1 trains on one device. Worker 1 is killed in step `VICTIM_STEP`, in the backward
pass before the first layer. Each worker writes the weights after each step. With
`counts` no worker is killed, and each prints, for each step, how often its host
waits for a device between the beginning of the step and its last update.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from backends.torch import nccl_double

import keras_strategies as ks
from keras_strategies.engines.torch.nccl_works import NcclWorks

STEPS, BATCH, VICTIM_STEP = 5, 6, 3


class Killing(torch.autograd.Function):
    """The identity; its backward pass ends the process."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return gradient


@ks.row_wise
class Layer(keras.layers.Layer):
    is_killing = False

    def call(self, x: Any) -> Any:
        is_call = self.is_killing and not isinstance(x, keras.KerasTensor)
        return Killing.apply(x) if is_call and x.requires_grad else x


class Waits(keras.callbacks.Callback):
    """Counts calls in which the host waits for a device, or looks at its progress."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[str]] = []
        self._is_in_step = False
        for name in ("item", "tolist", "cpu", "__float__", "__bool__", "__int__"):
            self._count(torch.Tensor, name)
        for name in ("wait", "is_completed"):
            self._count(nccl_double.Work, name)
        self._count(NcclWorks, "confirm")

    def _count(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(this: Any, *args: Any, **kwargs: Any) -> Any:
            # `wait` orders streams the first time, which the double cannot do.
            if self._is_in_step and name != "wait":
                self.steps[-1].append(f"{owner.__name__}.{name}")
            return original(this, *args, **kwargs)

        setattr(owner, name, counted)

    def on_train_begin(self, logs: Any = None) -> None:
        update = self.model.optimizer.apply

        def apply(*args: Any, **kwargs: Any) -> None:
            update(*args, **kwargs)
            self._is_in_step = False

        self.model.optimizer.apply = apply

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.steps.append([])
        self._is_in_step = True

    def on_train_end(self, logs: Any = None) -> None:
        print("waits", json.dumps(self.steps))


class Steps(keras.callbacks.Callback):
    def __init__(self, layer: Layer, is_victim: bool):
        super().__init__()
        self._layer, self._is_victim = layer, is_victim
        self.weights: dict[str, Any] = {}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._layer.is_killing = self._is_victim and batch + 1 == VICTIM_STEP

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note(batch + 1)

    def note(self, name: object) -> None:
        values = [each.ravel() for each in self.model.get_weights()]
        self.weights[str(name)] = np.concatenate(values)


def main(folder: Path, index: int, option: str) -> None:
    is_elastic, counts = option == "elastic", option == "counts"
    strategy = None
    if index >= 0:
        nccl_double.install()
        strategy = ks.MultiWorkerMirroredStrategy(
            # Each variable is a pack.
            communication_options=ks.CommunicationOptions(
                bytes_per_pack=1, timeout_seconds=60
            ),
            devices=["cpu:0"],
            elastic=ks.Elastic(1, timeout_seconds=60) if is_elastic else None,
        )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, 4)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    keras.utils.set_random_seed(3)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        layer = Layer()
        model = keras.Sequential(
            [
                keras.Input((4,)),
                # Its gradient is the last pack: no later one fails because of it.
                keras.layers.Dense(5, use_bias=False),
                layer,
                keras.layers.BatchNormalization(),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    steps = Steps(layer, index == 1 and not counts)
    callbacks = [steps, *([Waits()] if counts else [])]
    try:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
    finally:
        steps.note("end")
        np.savez(folder / f"weights{index}.npz", **steps.weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), "".join(sys.argv[3:]))
