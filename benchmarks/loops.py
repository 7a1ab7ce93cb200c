"""Custom loops in `ks.function`: against `fit`, and against each backend's own loop.

One run measures everything that it compares, on one core and on two. The loop is the
portable one: `ks.value_and_grad`, `optimizer.apply` and `strategy.run` in a
`ks.function`, over a distributed dataset. It is held against

- `fit` of the same model: plain Keras on one core, ours under the same strategy on two;
- the loop that one writes by hand without this package: on JAX `jax.jit` over
  stateless calls, with the batch sharded over a mesh; on Torch `loss.backward()` and a
  torch optimizer, on one device; on TensorFlow a `tf.function` with a gradient tape,
  under `tf.distribute.MirroredStrategy` on two cores.

Every number is the median over rounds of the milliseconds per step of an epoch, after
one that compiles; ratios have the range of the rounds. Above 1 the loop takes longer.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fit import keras_contestant, no_scope
from measuring import (
    BACKENDS,
    Contestants,
    Results,
    measure,
    options_parser,
    ratio,
    run_worker,
    use_cores,
)
from models import CLASSIFIERS, WORKLOADS, Workload, stateless_step
from page import write_page
from tables import markdown_table

HERE = Path(__file__).parent


def timed(workload: Workload, epoch: Callable[[], Any]) -> Callable[[], float]:
    """Milliseconds per step of what `epoch` does; it waits for its last result."""

    def run() -> float:
        start = time.perf_counter()
        epoch()
        return (time.perf_counter() - start) / workload.steps * 1000

    return run


def slices(workload: Workload) -> Iterator[Any]:
    x, y = workload.data()
    for start in range(0, len(x), workload.batch):
        rows = slice(start, start + workload.batch)
        yield x[rows], y[rows]


def portable_loop(workload: Workload, strategy: Any) -> Callable[[], float]:
    import keras

    import keras_strategies as ks

    with strategy.scope():
        model = workload.compiled()
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction=None
    )

    def replica_step(x: Any, y: Any) -> Any:
        def loss_fn() -> Any:
            return ks.compute_average_loss(loss_of(y, model(x, training=True)))

        variables = model.trainable_variables
        loss, gradients = ks.value_and_grad(loss_fn, variables)()
        optimizer.apply(gradients, variables)
        return loss

    @ks.function
    def step(x: Any, y: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(x, y)))

    dataset = strategy.experimental_distribute_dataset(
        workload.data(), batch_size=workload.batch
    )

    def epoch() -> None:
        loss = None
        for x, y in dataset:
            loss = step(x, y)
        float(loss)

    return timed(workload, epoch)


def jax_loop(workload: Workload, cores: int) -> Callable[[], float]:
    import jax
    import keras
    import numpy as np

    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:cores]), ("batch",))
    rows = jax.NamedSharding(mesh, jax.P("batch"))
    model = workload.compiled()
    optimizer = keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    step = stateless_step(model, optimizer, loss_of)
    compiled = jax.jit(step, donate_argnums=0)
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    state = jax.device_put(
        tuple([v.value for v in group] for group in variables),
        jax.NamedSharding(mesh, jax.P()),
    )

    def epoch() -> None:
        nonlocal state
        loss = None
        for x, y in slices(workload):
            state, loss = compiled(state, *jax.device_put((x, y), rows))
        float(loss)

    return timed(workload, epoch)


def torch_loop(workload: Workload, cores: int) -> Callable[[], float]:
    import torch
    from torch.nn.functional import cross_entropy

    model = workload.compiled()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def epoch() -> None:
        loss = None
        for x, y in slices(workload):
            optimizer.zero_grad()
            scores = model(torch.as_tensor(x), training=True)
            loss = cross_entropy(scores, torch.as_tensor(y))
            loss.backward()
            optimizer.step()
        loss.item()

    return timed(workload, epoch)


def tensorflow_loop(workload: Workload, cores: int) -> Callable[[], float]:
    import keras
    import tensorflow as tf

    devices = [f"CPU:{i}" for i in range(cores)]
    strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope():
        model = workload.compiled()
        optimizer = keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)
    loss_of = tf.nn.sparse_softmax_cross_entropy_with_logits

    def replica_step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = loss_of(y, model(x, training=True))
            loss = tf.reduce_sum(losses) / workload.batch
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function
    def step(batch: Any) -> Any:
        losses = strategy.run(replica_step, args=batch)
        return strategy.reduce("SUM", losses, axis=None)

    dataset = tf.data.Dataset.from_tensor_slices(workload.data())
    dataset = dataset.batch(workload.batch, drop_remainder=True).prefetch(2)
    distributed = strategy.experimental_distribute_dataset(dataset)

    def epoch() -> None:
        loss = None
        for batch in distributed:
            loss = step(batch)
        float(loss)

    return timed(workload, epoch)


NATIVE = {"jax": jax_loop, "torch": torch_loop, "tensorflow": tensorflow_loop}


def contestants(workload: Workload, backend: str, cores: int) -> Contestants:
    import keras_strategies as ks

    devices = [f"cpu:{i}" for i in range(cores)]
    if cores == 1:
        strategy: Any = ks.OneDeviceStrategy(devices[0])
        scope = no_scope
    else:
        strategy = ks.MirroredStrategy(devices)
        scope = strategy.scope
    return {
        "loop": portable_loop(workload, strategy),
        "fit": keras_contestant(workload, scope),
        "native": NATIVE[backend](workload, cores),
    }


def work(backend: str, cores: int, name: str, rounds: int) -> None:
    """Measures on one or two cores and prints a line of JSON."""
    use_cores(backend, cores)
    found = contestants(WORKLOADS[name], backend, cores)
    print(json.dumps(measure(found, rounds)))


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    header = ["backend", "model", "loop / fit, 1 core", "2 cores"]
    header += ["loop / by hand, 1 core", "2 cores"]
    rows = []
    for backend, models in results.items():
        for name, by_cores in models.items():
            ratios = [
                ratio(rounds["loop"], rounds[peer])
                for peer in ("fit", "native")
                for rounds in by_cores.values()
            ]
            rows.append([backend, name, *ratios])
    return markdown_table(header, rows)


def main() -> None:
    options = options_parser(
        __doc__, BACKENDS, CLASSIFIERS, has_workers=True
    ).parse_args()
    if options.worker:
        work(options.worker, options.cores, options.model, options.rounds)
        return
    results = Results(options.output / "loops.json")
    for backend in options.backends:
        print(f"measuring {backend} ...", file=sys.stderr, flush=True)
        found = {
            name: {
                str(cores): run_worker(__file__, backend, cores, name, options.rounds)
                for cores in (1, 2)
            }
            for name in options.models
        }
        results.put(backend, found)
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
