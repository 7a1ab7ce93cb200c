"""A training on `nccl_double`, one worker of which is killed in a backward pass.

    python nccl_training.py FOLDER [elastic] [counts] [loop]

Without `TF_CONFIG` it trains on one device. Worker 1 is killed in step `VICTIM_STEP`,
in the backward pass before the first layer; of a loop, when it sums its gradients. Each
worker writes the weights after each step. With `counts` no worker is killed, and each
prints, for each step, how often its host waits for a device between the beginning of
the step and its end, where collectives are confirmed; metrics are among it. With `loop`
steps are runs of a loop with a metric.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import torch
from backends.torch import nccl_double

import keras_strategies as ks
from keras_strategies.engines.torch import confirmed_steps
from keras_strategies.engines.torch.nccl_works import NcclWorks
from keras_strategies.engines.torch.tensor_primitives import TorchPrimitives
from keras_strategies.engines.torch.worker_collectives import TorchCommunicator

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
        self.is_in_step = False
        for name in ("item", "tolist", "cpu", "__float__", "__bool__", "__int__"):
            self._count(torch.Tensor, name)
        for name in ("wait", "is_completed"):
            self._count(nccl_double.Work, name)
        self._count(NcclWorks, "confirm")
        self._leave_out(TorchPrimitives, "all_lengths")

    def _leave_out(self, owner: Any, name: str) -> None:
        """Hosts exchange numbers of rows."""
        original = getattr(owner, name)

        def left_out(*args: Any) -> Any:
            before, self.is_in_step = self.is_in_step, False
            found = original(*args)
            self.is_in_step = before
            return found

        setattr(owner, name, left_out)

    def _count(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(this: Any, *args: Any, **kwargs: Any) -> Any:
            # `wait` orders streams the first time, which the double cannot do.
            if self.is_in_step and name != "wait":
                self.steps[-1].append(f"{owner.__name__}.{name}")
            return original(this, *args, **kwargs)

        setattr(owner, name, counted)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.steps.append([])
        self.is_in_step = True

    def on_train_end(self, logs: Any = None) -> None:
        print("waits", json.dumps(self.steps))

    def until_confirmed(self, check: Callable[[int], None]) -> None:
        """Steps end where collectives are confirmed; `check` gets their number."""
        confirm = confirmed_steps._confirm

        def last(*given: Any) -> None:
            self.is_in_step = False
            check(len(self.steps))
            confirm(*given)

        confirmed_steps._confirm = last


class Steps(keras.callbacks.Callback):
    def __init__(self, layer: Layer, is_victim: bool):
        super().__init__()
        self._layer, self.is_victim = layer, is_victim
        self.weights: dict[str, Any] = {}

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._layer.is_killing = self.is_victim and batch + 1 == VICTIM_STEP

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.note(batch + 1)

    def note(self, name: object) -> None:
        values = [each.ravel() for each in self.model.get_weights()]
        self.weights[str(name)] = np.concatenate(values)


def kill_in_sums(folder: Path, size: int, is_victim: bool) -> None:
    """Ends a process that is to sum its gradients, when the other one has begun to."""
    start, steps = TorchCommunicator.start_all_reduce, itertools.count(1)
    has_begun = folder / "begun"

    def noted(this: Any, op: Any, flat: torch.Tensor) -> Any:
        is_last = flat.numel() == size and next(steps) == VICTIM_STEP
        while is_last and is_victim:
            if has_begun.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.01)
        found = start(this, op, flat)
        if is_last:
            has_begun.touch()
        return found

    TorchCommunicator.start_all_reduce = noted  # type: ignore[method-assign]


def loop(strategy: Any, model: Any, data: Any, callbacks: list[Any]) -> None:
    """Steps of `run`, with a metric."""
    with strategy.scope():
        error = keras.metrics.MeanSquaredError()
    variables = model.trainable_variables

    def replica_step(x: Any, y: Any) -> None:
        def loss() -> Any:
            found = model(x, training=True)
            error.update_state(y, found)
            return ks.compute_average_loss(keras.ops.mean((y - found) ** 2, axis=-1))

        _, gradients = ks.value_and_grad(loss, variables)()
        model.optimizer.apply(gradients, variables)

    for waits in callbacks[1:]:
        waits.until_confirmed(lambda step: _check(model, error, step))
    dataset = strategy.experimental_distribute_dataset(data, batch_size=BATCH)
    for i, batch in enumerate(dataset):
        for each in callbacks:
            each.on_train_batch_begin(i)
        strategy.run(replica_step, args=batch)
        for each in callbacks:
            each.on_train_batch_end(i)
    for each in callbacks:
        each.on_train_end()


def _check(model: Any, metric: Any, step: int) -> None:
    """Updates and metrics of a step have been launched."""
    assert int(model.optimizer.iterations) == step
    assert float(metric.count) == step * BATCH


def main(folder: Path, options: set[str]) -> None:
    config = json.loads(os.environ.get("TF_CONFIG", "{}"))
    index = config["task"]["index"] if config else -1
    counts = "counts" in options
    strategy: Any = ks.OneDeviceStrategy("cpu:0")
    if index >= 0:
        nccl_double.install()
        strategy = ks.MultiWorkerMirroredStrategy(
            # In `fit` each variable is a pack. A run sends packs one after the other,
            # and the second one would fail, since the double waits for the first.
            communication_options=ks.CommunicationOptions(
                bytes_per_pack=0 if "loop" in options else 1, timeout_seconds=60
            ),
            devices=["cpu:0"],
            elastic=ks.Elastic(1, timeout_seconds=60) if "elastic" in options else None,
        )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS * BATCH, 4)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    keras.utils.set_random_seed(3)
    with strategy.scope():
        layer = Layer()
        # Its gradient is the last pack: no later one fails because of it.
        first = keras.layers.Dense(5, use_bias=False)
        others = [keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), first, layer, *others])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, "mse", metrics=["mae"] if counts else None)
    steps = Steps(layer, index == 1 and not counts)
    steps.set_model(model)
    callbacks: list[Any] = [steps, Waits()] if counts else [steps]
    if "loop" in options and index >= 0 and not counts:
        steps.is_victim = False
        size = sum(v.value.numel() for v in model.trainable_variables)
        kill_in_sums(folder, size, index == 1)
    try:
        if "loop" in options:
            model.optimizer.build(model.trainable_variables)
            loop(strategy, model, (x, y), callbacks)
        else:
            for waits in callbacks[1:]:
                waits.until_confirmed(
                    lambda step: _check(model, model.metrics[-1].metrics[0], step)
                )
            given = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
            model.fit(x, y, callbacks=callbacks, **given)
    finally:
        steps.note("end")
        np.savez(folder / f"weights{index}.npz", **steps.weights)


if __name__ == "__main__":
    main(Path(sys.argv[1]), set(sys.argv[2:]))
