"""Further measurements of parameter servers; each part prints a line of JSON.

python parameter_server_parts.py bytes|scaling|faults|curve-ours|curve-fresh|
    curve-tensorflow|curve-one-device
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from parameter_server_contestants import (
    WORKLOADS,
    clicks,
    ours,
    sparse,
    tensorflow_cluster,
)

TABLE_ROWS = (10_000, 100_000, 1_000_000, 10_000_000)
SHAPES = ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2))
CURVE_EPOCHS, CURVE_STEPS, CURVE_ROWS = 40, 50, 500


def bytes_per_step() -> dict[str, float]:
    """Bytes of a step between workers and servers, by the rows of the table."""
    import keras

    import keras_strategies as ks

    found = {}
    for rows in TABLE_ROWS:
        x, y = clicks(1024 * 20, rows)
        with ks.ParameterServerStrategy() as strategy:
            with strategy.scope():
                model = sparse(keras, 1, rows)
            model.fit(x, y, batch_size=1024, verbose=0)
            found[str(rows)] = ks.ClusterCoordinator(strategy).status().bytes_per_step
        print(found, file=sys.stderr, flush=True)
    return found


def scaling() -> dict[str, float]:
    """Steps per second of the sparse model by the numbers of workers and servers."""
    return {
        f"{workers} workers, {servers} servers": max(
            ours(WORKLOADS["sparse"], workers, servers).values()
        )
        for workers, servers in SHAPES
    }


# --- Loss curves --------------------------------------------------------------


def curve_data() -> Any:
    return clicks(1024 * CURVE_STEPS, CURVE_ROWS)


def curve_ours(**options: Any) -> list[float]:
    """The loss of each epoch under our strategy."""
    import keras

    import keras_strategies as ks

    with ks.ParameterServerStrategy(**options) as strategy, strategy.scope():
        return fitted(keras)


def curve_fresh() -> list[float]:
    """The same with values that miss fewer updates."""
    return curve_ours(pull_ahead=False)


def curve_one_device() -> list[float]:
    import keras

    return fitted(keras)


def fitted(keras: Any) -> list[float]:
    x, y = curve_data()
    keras.utils.set_random_seed(0)
    model = sparse(keras, 1, CURVE_ROWS)
    history = model.fit(
        x, y, batch_size=1024, epochs=CURVE_EPOCHS, shuffle=False, verbose=0
    )
    return list(history.history["loss"])


def curve_tensorflow() -> list[float]:
    with tensorflow_cluster(2, 1):
        import tensorflow as tf
        import tf_keras

        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        strategy = tf.distribute.ParameterServerStrategy(resolver)
        tf_keras.utils.set_random_seed(0)

        def dataset(context: Any) -> Any:
            # Each worker has half of the rows, as our coordinator deals them out.
            rows = tf.data.Dataset.from_tensor_slices(curve_data())
            rows = rows.batch(1024)
            if context.num_input_pipelines > 1:
                rows = rows.shard(
                    context.num_input_pipelines, context.input_pipeline_id
                )
            return rows.repeat()

        with strategy.scope():
            model = sparse(tf_keras, 1, CURVE_ROWS)
        history = model.fit(
            tf_keras.utils.experimental.DatasetCreator(dataset),
            steps_per_epoch=CURVE_STEPS,
            epochs=CURVE_EPOCHS,
            verbose=0,
        )
        return list(history.history["loss"])


# --- Faults -------------------------------------------------------------------


def faults() -> dict[str, dict[str, float]]:
    """For each fault the seconds until all tasks work again, and the steps lost."""
    return {
        "a worker is killed": fault("worker", signal.SIGKILL),
        "a worker is stopped (SIGSTOP), noticed after 5 s": fault(
            "worker", signal.SIGSTOP, silence_seconds=5.0
        ),
        "the server is killed; snapshots each second": fault(
            "ps", signal.SIGKILL, snapshot_seconds=1.0
        ),
        "the server is stopped, noticed after 5 s; snapshots each second": fault(
            "ps", signal.SIGSTOP, snapshot_seconds=1.0, silence_seconds=5.0
        ),
    }


def fault(kind: str, number: int, **options: Any) -> dict[str, float]:
    """One fault in the middle of closures that count themselves."""
    import keras

    import keras_strategies as ks

    with (
        tempfile.TemporaryDirectory() as folder,
        ks.ParameterServerStrategy(snapshot_folder=folder, **options)
        if "snapshot_seconds" in options
        else ks.ParameterServerStrategy(**options) as strategy,
    ):
        coordinator = ks.ClusterCoordinator(strategy)
        with strategy.scope():
            total = keras.Variable(0.0, name="total", trainable=False)

        def step() -> None:
            total.assign_add(1.0)
            time.sleep(0.01)

        scheduler = strategy.cluster.scheduler
        states = scheduler.workers if kind == "worker" else scheduler.servers
        scheduled = schedule_for(coordinator, step, 2.0, lambda: False)
        pid = states[0].pid
        os.kill(pid, number)
        start = time.monotonic()

        def is_back() -> bool:
            state = states[0]
            is_alive = state.is_alive if kind == "worker" else state.is_ready
            return state.pid != pid and is_alive

        scheduled += schedule_for(coordinator, step, 60.0, is_back)
        coordinator.schedule(step).fetch(60.0)
        seconds = time.monotonic() - start
        coordinator.join(120.0)
        return {"seconds": seconds, "lost": scheduled + 1 - float(total.numpy())}


def schedule_for(
    coordinator: Any, step: Any, seconds: float, is_enough: Callable[[], bool]
) -> int:
    """Keeps workers busy for so long; how many steps that were."""
    until = time.monotonic() + seconds
    count = 0
    while time.monotonic() < until and not is_enough():
        # A short queue, so that what comes after the fault is seen soon.
        if len(coordinator.strategy.cluster.scheduler.tasks.waiting) < 4:
            coordinator.schedule(step)
            count += 1
        else:
            time.sleep(0.002)
    return count


PARTS: dict[str, Callable[[], Any]] = {
    "bytes": bytes_per_step,
    "scaling": scaling,
    "curve-ours": curve_ours,
    "curve-fresh": curve_fresh,
    "curve-tensorflow": curve_tensorflow,
    "curve-one-device": curve_one_device,
    "faults": faults,
}


def main() -> None:
    print(json.dumps(PARTS[sys.argv[1]]()))


if __name__ == "__main__":
    main()
