"""One launch of a parameter server cluster: ours, or TensorFlow's with `tf_keras`.

    python parameter_server_contestants.py ours sparse
    python parameter_server_contestants.py tensorflow sparse

trains with each way of making steps and prints a line of JSON: steps per second by way.
Both sides get the same arrays in memory, the same model and the same numbers of workers
and servers, each a process of its own on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

STEPS_PER_EXECUTION = (1, 10)
# The first one compiles and does not count.
EPOCHS = 3
_INTER_OP_THREADS = 4


@dataclass(frozen=True)
class Workload:
    """A model and its data, for Keras 3 and for `tf_keras`.

    Args:
        name: str.
        build: makes the compiled model of a Keras module; the argument after it is
            the number of steps per execution.
        example: makes so many rows of input and labels.
        batch: int, rows of a batch.
        steps: int, steps of one epoch.
    """

    name: str
    build: Callable[[Any, int], Any]
    example: Callable[[int], tuple[np.ndarray, np.ndarray]]
    batch: int
    steps: int

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        return self.example(self.batch * self.steps)


def sparse(keras: Any, steps_per_execution: int, rows: int = 200_000) -> Any:
    """A table of which each row of input looks up eight rows."""
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.InputLayer((8,), dtype="int32"),
            layers.Embedding(rows, 64),
            layers.GlobalAveragePooling1D(),
            layers.Dense(64, activation="relu"),
            layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.Adagrad(0.1),
        keras.losses.BinaryCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
    )
    return model


def clicks(count: int, rows: int = 200_000) -> tuple[np.ndarray, np.ndarray]:
    """Ids, and labels that depend on a score of each id."""
    random = np.random.default_rng(0)
    ids = random.integers(0, rows, (count, 8), dtype="int32")
    score = random.normal(size=rows)[ids].mean(axis=1)
    return ids, (score > 0).astype("float32")[:, None]


def dense(keras: Any, steps_per_execution: int) -> Any:
    layers = keras.layers
    hidden = [layers.Dense(1024, activation="relu") for _ in range(3)]
    model = keras.Sequential([layers.InputLayer((784,)), *hidden, layers.Dense(10)])
    model.compile(
        keras.optimizers.SGD(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=steps_per_execution,
    )
    return model


def pictures(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.random((count, 784), dtype="float32")
    return x, random.integers(0, 10, count)


WORKLOADS = {
    "sparse": Workload("sparse", sparse, clicks, batch=1024, steps=60),
    "dense": Workload("dense", dense, pictures, batch=256, steps=20),
}


class Clock:
    """The steps per second of each epoch but the first, which compiles."""

    def __init__(self, keras: Any, steps: int):
        class Callback(keras.callbacks.Callback):  # type: ignore[misc, name-defined]
            def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
                self.start = time.perf_counter()

            def on_epoch_end(callback, epoch: int, logs: Any = None) -> None:
                seconds = time.perf_counter() - callback.start
                if epoch:
                    self.speeds.append(steps / seconds)

        self.speeds: list[float] = []
        self.callback = Callback()

    @property
    def speed(self) -> float:
        return statistics.median(self.speeds)


# --- Ours ---------------------------------------------------------------------


def ours(
    workload: Workload, workers: int = 2, servers: int = 1, **options: Any
) -> dict[str, float]:
    """Steps per second of `Model.fit` under `ks.ParameterServerStrategy`."""
    import keras

    import keras_strategies as ks

    x, y = workload.data()
    resolver = ks.cluster_resolver.LocalClusterResolver(workers, servers)
    found = {}
    with ks.ParameterServerStrategy(resolver, **options) as strategy:
        for steps_per_execution in STEPS_PER_EXECUTION:
            with strategy.scope():
                model = workload.build(keras, steps_per_execution)
            states = strategy.cluster.scheduler.workers.values()
            before = {state.index: state.steps for state in states}
            # Workers compile one by one, which may take several epochs.
            while min(state.steps - before[state.index] for state in states) < 20:
                model.fit(x, y, batch_size=workload.batch, shuffle=False, verbose=0)
            clock = Clock(keras, workload.steps)
            model.fit(
                x,
                y,
                batch_size=workload.batch,
                shuffle=False,
                epochs=EPOCHS,
                verbose=0,
                callbacks=[clock.callback],
            )
            found[f"fit, {steps_per_execution} per call"] = clock.speed
    return found


# --- TensorFlow's -------------------------------------------------------------


@contextlib.contextmanager
def tensorflow_cluster(workers: int, servers: int) -> Iterator[None]:
    """Starts TensorFlow's servers, and says in `TF_CONFIG` where they are."""
    from keras_strategies.cluster.resolvers.local_processes import free_addresses

    addresses = free_addresses(workers + servers + 1)
    cluster = {
        "worker": addresses[:workers],
        "ps": addresses[workers:-1],
        "chief": addresses[-1:],
    }
    tasks = [("worker", i) for i in range(workers)] + [
        ("ps", i) for i in range(servers)
    ]

    def config(kind: str, index: int) -> dict[str, str]:
        task = {"type": kind, "index": index}
        return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}

    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "serve", "-"],
            env={**os.environ, **config(*task)},
            stdin=subprocess.PIPE,
        )
        for task in tasks
    ]
    os.environ.update(config("chief", 0))
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def serve() -> None:
    """A worker or a parameter server of TensorFlow's, until its input ends."""
    import tensorflow as tf

    def watch() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    # As TensorFlow's guide does: with a thread for each core of a small machine,
    # functions that wait for one another would wait for ever.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=_INTER_OP_THREADS)
    tf.distribute.Server(
        resolver.cluster_spec(),
        config=config,
        job_name=resolver.task_type,
        task_index=resolver.task_id,
        protocol="grpc",
    ).join()


@contextlib.contextmanager
def tensorflow_strategy(
    workers: int = 2, servers: int = 1, shards: int = 1
) -> Iterator[Any]:
    """TensorFlow's strategy with a cluster of its own, and variables in shards."""
    with tensorflow_cluster(workers, servers):
        import tensorflow as tf

        tf.config.threading.set_inter_op_parallelism_threads(_INTER_OP_THREADS)
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        fixed = tf.distribute.experimental.partitioners.FixedShardsPartitioner(shards)
        partitioner = fixed if shards > 1 else None
        yield tf.distribute.ParameterServerStrategy(resolver, partitioner)


def tensorflow_input(workload: Workload) -> Callable[..., Any]:
    """A function that makes the dataset of a worker."""
    x, y = workload.data()

    def dataset(context: Any = None) -> Any:
        import tensorflow as tf

        rows = tf.data.Dataset.from_tensor_slices((x, y))
        rows = rows.batch(workload.batch, drop_remainder=True).repeat()
        return rows.prefetch(2)

    return dataset


def tensorflow(
    workload: Workload, workers: int = 2, servers: int = 1
) -> dict[str, float]:
    """Steps per second of `tf_keras`'s `fit`, and of a `ClusterCoordinator`'s loop."""
    with tensorflow_strategy(workers, servers) as strategy:
        import tf_keras

        dataset = tensorflow_input(workload)
        found = {}
        for steps_per_execution in STEPS_PER_EXECUTION:
            with strategy.scope():
                model = workload.build(tf_keras, steps_per_execution)
            clock = Clock(tf_keras, workload.steps)
            model.fit(
                tf_keras.utils.experimental.DatasetCreator(dataset),
                steps_per_epoch=workload.steps,
                epochs=EPOCHS,
                verbose=0,
                callbacks=[clock.callback],
            )
            found[f"fit, {steps_per_execution} per call"] = clock.speed
        found["coordinator"] = coordinator_loop(workload, strategy, dataset)
    return found


def coordinator_loop(workload: Workload, strategy: Any, dataset: Any) -> float:
    """Steps per second of a loop as TensorFlow's guide writes it."""
    import tensorflow as tf
    import tf_keras

    with strategy.scope():
        model = workload.build(tf_keras, 1)
        # Of a loss that reduces by itself, TensorFlow wants to know over what.
        each = type(model.loss).from_config(
            {**model.loss.get_config(), "reduction": "none"}
        )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    def replica_step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(each(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        return loss

    @tf.function
    def step(iterator: Any) -> Any:
        return strategy.run(replica_step, args=(next(iterator),))

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    speeds = []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        for _ in range(workload.steps):
            coordinator.schedule(step, args=(iterator,))
        coordinator.join()
        speeds.append(workload.steps / (time.perf_counter() - start))
    return statistics.median(speeds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("side", choices=["ours", "tensorflow", "serve"])
    parser.add_argument("workload")
    options = parser.parse_args()
    if options.side == "serve":
        serve()
        return
    contestant = {"ours": ours, "tensorflow": tensorflow}[options.side]
    print(json.dumps(contestant(WORKLOADS[options.workload])))


if __name__ == "__main__":
    main()
