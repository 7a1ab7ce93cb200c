"""Custom loops of elastic workers that are lost and join, and what they end with.

    python elastic_loop.py SETTINGS INDEX IS_NEW

See `elastic_training.py`. The source of `Settings` says what a step is: a `ks.function`
("function"), `strategy.run` ("run") or `train_on_batch` ("on_batch").
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from typing import Any

import numpy as np
from elastic.elastic_training import (
    BATCH_SIZE,
    ROWS,
    Settings,
    await_newcomer,
    data,
    kills_of,
)

STEPS = 16


def batches_from(step: int) -> Any:
    """The global batches after some steps, of passes over the rows."""
    arrays = data()
    starts = itertools.cycle(range(0, ROWS, BATCH_SIZE))
    for start in itertools.islice(starts, step, STEPS):
        yield tuple(array[start : start + BATCH_SIZE] for array in arrays)


def main() -> None:
    import keras

    import keras_strategies as ks

    settings, index, is_new, folder = Settings.of_process()
    strategy = settings.strategy(index)
    is_eager = keras.backend.backend() == "torch"
    mine = [] if is_new else kills_of(settings, index, is_eager)
    step = 0

    def place(name: str) -> None:
        """A place of the step that is counted from 1."""
        now = step if name == "end" else step + 1
        if any(kill.step == now and kill.place == name for kill in mine):
            os.kill(os.getpid(), signal.SIGKILL)
        if name == "begin" and index >= 0 and not is_new and str(now) in settings.waits:
            await_newcomer(strategy, folder, now)

    class Gate(keras.layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            if is_eager and training:
                place("layer")
            return x

    if is_new:
        (folder / f"new{index}-{os.getpid()}").touch()
    keras.utils.set_random_seed(11)
    with strategy.scope():
        hidden = [keras.layers.Dense(6, "tanh"), keras.layers.BatchNormalization()]
        last = keras.layers.Dense(1, "sigmoid")
        model = keras.Sequential([keras.Input((4,)), *hidden, Gate(), last])
        optimizer = keras.optimizers.Adam(0.03)
        auc = keras.metrics.AUC(num_thresholds=20)
        if settings.source == "on_batch":
            model.compile(optimizer, "binary_crossentropy", weighted_metrics=[auc])

    def replica_step(batch: Any) -> Any:
        x, y, weights = batch

        def loss_fn() -> Any:
            predictions = model(x, training=True)
            each = keras.losses.binary_crossentropy(y, predictions) * weights
            return keras.ops.sum(each) / BATCH_SIZE, predictions

        variables = model.trainable_variables
        (loss, predictions), gradients = ks.value_and_grad(
            loss_fn, variables, has_aux=True
        )()
        optimizer.apply(gradients, variables)
        auc.update_state(y, predictions, weights)
        return loss

    def run(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, (batch,)))

    train_step = {
        "run": run,
        "function": ks.function(run),
        "on_batch": lambda batch: model.train_on_batch(*batch)[0],
    }[settings.source]

    def input_from(step: int) -> Any:
        if settings.source == "on_batch":
            return batches_from(step)
        given = list(batches_from(step))
        return iter(strategy.experimental_distribute_dataset(given))

    losses: dict[int, float] = {}
    changes = []
    batches = input_from(0)
    while step < STEPS:
        try:
            place("begin")
            losses[step + 1] = float(train_step(next(batches)))
            step += 1
            place("end")
        except ks.WorkersChanged as change:
            step, batches = change.step, input_from(change.step)
            changes.append([step, change.lost, change.joined, change.workers])
            print(change, flush=True)
    np.savez(folder / f"results{index}.npz", *model.get_weights())
    found = {"losses": losses, "changes": changes, "auc": float(auc.result())}
    (folder / f"results{index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
