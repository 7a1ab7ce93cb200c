"""Model parallelism: against Keras's `ModelParallel` by itself, and against `jax.jit`.

One run on two virtual CPU devices with a core each trains the same transformer and the
same perceptron in three ways, with variables sharded alike: under
`ks.ModelParallelStrategy`; under `keras.distribution.ModelParallel` with a `LayoutMap`;
and by hand, with a `jax.jit` over stateless calls with shardings of state and batches.
Numbers are medians of rounds in which they take turns, in milliseconds per step.
Memory is the peak of a step on each of four devices, from the analysis of the compiled
program, for a model axis of 1, 2 and 4 devices, and for FSDP.

On TensorFlow it stands beside `MirroredStrategy`, on four devices with two cores:
bytes of variables and slots on the device that has the most, what TensorFlow allocates
for a step of all devices together, which have one memory here, gathers and other
transfers of a step, and its time.

On Torch it stands beside `parallelize_module` and `fully_shard` by hand, on processes
that share two cores; see `fsdp.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsdp
from measuring import (
    Results,
    epoch_timer,
    measure,
    medians,
    names,
    options_parser,
    ratio,
    run_script,
    use_cores,
)
from models import stateless_step
from page import write_page
from tables import markdown_table

HERE = Path(__file__).parent
BATCH, STEPS = 32, 24
LAYOUTS = {"model axis": ("auto", 2), "fsdp": ("fsdp", 1)}
# Processes along the data axis and the model axis, on Torch.
GRIDS = {"1 x 2": (1, 2), "1 x 4": (1, 4), "2 x 2": (2, 2)}


def transformer() -> Any:
    sys.path.insert(0, str(HERE.parent / "examples"))
    import keras
    from sharded_transformer import transformer as build

    model = build(width=256, blocks=2, heads=8)
    model.compile(keras.optimizers.Adam(1e-3), _loss())
    return model


def perceptron() -> Any:
    import keras
    from keras import layers

    keras.utils.set_random_seed(1)
    # Named, so that paths are the same in each model of a process.
    hidden = [layers.Dense(1024, "relu", name=f"hidden{i}") for i in range(4)]
    last = layers.Dense(32, name="scores")
    model = keras.Sequential([keras.Input((12,)), *hidden, last], name="perceptron")
    model.compile(keras.optimizers.Adam(1e-3), _loss())
    return model


def _loss() -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


MODELS: dict[str, Callable[[], Any]] = {
    "transformer": transformer,
    "perceptron": perceptron,
}


def data(name: str) -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    x = random.integers(0, 32, (BATCH * STEPS, 12)).astype("int32")
    return x, (x if name == "transformer" else x[:, 0])


def fitted(name: str, scope: Callable[[], Any]) -> Callable[[], float]:
    """Milliseconds per step of an epoch of `fit` in a scope."""
    with scope():
        model = MODELS[name]()
    x, y = data(name)
    timer = epoch_timer()

    def run() -> float:
        with scope():
            model.fit(
                x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[timer]
            )
        return timer.seconds / STEPS * 1000

    return run


def by_keras(name: str, strategy: Any) -> Callable[[], float]:
    """Keras alone, with the layouts that the strategy gives the same variables."""
    from keras.distribution import LayoutMap, ModelParallel

    mesh = strategy.distribution.device_mesh
    layout_map = LayoutMap(mesh)
    for path, axes in layouts(name, strategy).items():
        layout_map[path] = axes
    distribution = ModelParallel(
        layout_map=layout_map, batch_dim_name="batch", auto_shard_dataset=False
    )
    return fitted(name, distribution.scope)


def layouts(name: str, strategy: Any) -> dict[str, tuple[str | None, ...]]:
    with strategy.scope():
        model = MODELS[name]()
    return {
        path: (*axes, *[None] * (len(shape) - len(axes)))
        for path, shape, axes in strategy.describe(model).layouts
        if any(axes)
    }


def by_hand(name: str, strategy: Any) -> Callable[[], float]:
    """A jitted step on arrays with shardings, without `fit`."""
    import jax

    with strategy.scope():
        shardings = [v.value.sharding for v in MODELS[name]().trainable_variables]
    model = MODELS[name]()
    optimizer = model.optimizer
    optimizer.build(model.trainable_variables)
    loss_of = _loss()
    mesh = strategy.distribution.device_mesh.backend_mesh
    rows = jax.NamedSharding(mesh, jax.P("batch"))
    whole = jax.NamedSharding(mesh, jax.P())
    by_shape = {
        tuple(v.shape): s
        for v, s in zip(model.trainable_variables, shardings, strict=True)
    }
    slots = [by_shape.get(tuple(v.shape), whole) for v in optimizer.variables]
    rest = [whole for _ in model.non_trainable_variables]

    compiled = jax.jit(
        stateless_step(model, optimizer, loss_of),
        donate_argnums=0,
        out_shardings=((shardings, rest, slots), whole),
    )
    values = (
        [jax.device_put(v.value, s) for v, s in zip(vs, ss, strict=True)]
        for vs, ss in (
            (model.trainable_variables, shardings),
            (model.non_trainable_variables, rest),
            (optimizer.variables, slots),
        )
    )
    state = [tuple(values)]
    x, y = data(name)

    def run() -> float:
        start = time.perf_counter()
        total = 0.0
        for i in range(STEPS):
            part = slice(i * BATCH, (i + 1) * BATCH)
            batch = jax.device_put((x[part], y[part]), rows)
            state[0], loss = compiled(state[0], *batch)
        total += float(loss)
        return (time.perf_counter() - start) / STEPS * 1000

    return run


def work(rounds: int) -> None:
    """Measures everything on two cores and prints a line of JSON."""
    use_cores("jax", 2)
    import keras_strategies as ks

    results: dict[str, Any] = {}
    for name in MODELS:
        for kind, (layout_map, size) in LAYOUTS.items():
            strategy = ks.ModelParallelStrategy(
                layout_map, ["cpu:0", "cpu:1"], size, min_shard_bytes=2**14
            )
            contestants = {
                "ours": fitted(name, strategy.scope),
                "keras": by_keras(name, strategy),
                "by hand": by_hand(name, strategy),
            }
            results[f"{name}, {kind}"] = measure(contestants, rounds)
    print(json.dumps(results))


def memory() -> dict[str, dict[str, int]]:
    """Peak bytes of a step on each of four devices."""
    import keras_strategies as ks

    devices = [f"cpu:{i}" for i in range(4)]
    grids = {"4 x 1": ("auto", 1), "2 x 2": ("auto", 2), "1 x 4": ("auto", 4)}
    found: dict[str, dict[str, int]] = {}
    for name, build in MODELS.items():
        x, y = data(name)
        batch = (x[:BATCH], y[:BATCH])
        found[name] = {
            grid: ks.ModelParallelStrategy(kind, devices, size, min_shard_bytes=2**14)
            .plan(build, batch)
            .peak
            for grid, (kind, size) in {**grids, "fsdp, 4 x 1": ("fsdp", 1)}.items()
        }
    return found


def beside_mirrored(rounds: int) -> None:
    """Measures TensorFlow, and prints a line of JSON."""
    use_cores("tensorflow", 2, 4)
    import keras_strategies as ks

    devices = [f"cpu:{i}" for i in range(4)]
    strategies = {"MirroredStrategy": ks.MirroredStrategy(devices)}
    for kind, (layout_map, size) in LAYOUTS.items():
        strategies[kind] = ks.ModelParallelStrategy(
            layout_map, devices, size, min_shard_bytes=2**14
        )
    results: dict[str, Any] = {}
    for name, build in MODELS.items():
        x, y = data(name)
        runs = {kind: fitted(name, own.scope) for kind, own in strategies.items()}
        times = measure(runs, rounds)
        for kind, own in strategies.items():
            plan = own.plan(build, (x[:BATCH], y[:BATCH]))
            kinds = [plan.bytes_per_device(each) for each in ("weight", "slot")]
            results[f"{name}, {kind}"] = {
                "variables": max(
                    sum(each.get(device, 0) for each in kinds) for device in devices
                ),
                "allocated": allocated(name, own),
                "sent": {key: count for key, (count, _) in plan.cost.sent.items()},
                "times": times[kind],
            }
    print(json.dumps(results))


def allocated(name: str, strategy: Any) -> int:
    """Bytes that TensorFlow allocates at most in a step, with variables and slots."""
    import tensorflow as tf

    with strategy.scope():
        model = MODELS[name]()
    x, y = data(name)
    rows = x[:BATCH], y[:BATCH]
    model.fit(*rows, batch_size=BATCH, verbose=0)
    gc.collect()
    before = tf.config.experimental.get_memory_info("CPU:0")["current"]
    tf.config.experimental.reset_memory_stats("CPU:0")
    model.fit(*rows, batch_size=BATCH, verbose=0)
    peak = tf.config.experimental.get_memory_info("CPU:0")["peak"]
    return int(peak - before + sum(strategy.describe(model).totals.values()))


def times_table(times: dict[str, Any]) -> str:
    """Milliseconds per step, as a Markdown table."""
    header = ["model, layout", "ours", "Keras ModelParallel", "by hand"]
    header += ["ours / faster"]
    rows = []
    for name, rounds in times.items():
        ms = medians(rounds)
        faster = min(("keras", "by hand"), key=ms.__getitem__)
        cells = [f"{ms[each]:.1f} ms" for each in ("ours", "keras", "by hand")]
        rows.append([name, *cells, ratio(rounds[faster], rounds["ours"])])
    return markdown_table(header, rows)


def memory_table(peaks: dict[str, Any]) -> str:
    """Peak bytes of a step, as a Markdown table."""
    grids = list(next(iter(peaks.values())))
    rows = [
        [name, *(f"{own[grid] / 2**20:.1f} MiB" for grid in grids)]
        for name, own in peaks.items()
    ]
    return markdown_table(["peak per device", *grids], rows)


def tensorflow_table(found: dict[str, Any]) -> str:
    """Memory, gathers and time beside `MirroredStrategy`, as a Markdown table."""
    header = ["model, strategy", "variables, slots"]
    header += [
        "all devices",
        "gathers",
        "other transfers",
        "step",
        "MirroredStrategy / it",
    ]
    rows = []
    for name, own in found.items():
        mirrored = found[f"{name.partition(', ')[0]}, MirroredStrategy"]["times"]
        sizes = [own[key] / 2**20 for key in ("variables", "allocated")]
        gathers = own["sent"].get("all-gather of weights", 0)
        rows.append(
            [
                name,
                *(f"{size:.1f} MiB" for size in sizes),
                str(gathers),
                str(sum(own["sent"].values()) - gathers),
                f"{statistics.median(own['times']):.1f} ms",
                ratio(mirrored, own["times"]),
            ]
        )
    return markdown_table(header, rows)


def torch_table(found: dict[str, Any]) -> str:
    """Time and memory beside Torch by hand, as a Markdown table."""
    return fsdp.rows_table(found, "data x model", "by hand")


def main() -> None:
    parser = options_parser(__doc__)
    workers = {"times": "jax", "memory": "jax", "tensorflow": "tensorflow"}
    parser.add_argument("--worker", choices=list(workers), help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=names, default=[*workers, "torch"])
    options = parser.parse_args()
    if options.worker == "times":
        work(options.rounds)
        return
    if options.worker == "memory":
        print(json.dumps(memory()))
        return
    if options.worker == "tensorflow":
        beside_mirrored(options.rounds)
        return
    results = Results(options.output / "model_parallel.json")
    tables = {
        "times": times_table,
        "memory": memory_table,
        "tensorflow": tensorflow_table,
        "torch": torch_table,
    }
    for part in options.parts:
        if part == "torch":
            found: Any = {
                name: fsdp.measured(options.rounds, data_axis * model_axis, model_axis)
                for name, (data_axis, model_axis) in GRIDS.items()
            }
        else:
            arguments = ["--worker", part, "--rounds", str(options.rounds)]
            found = run_script(__file__, *arguments, backend=workers[part])
        results.put(part, found)
        print(tables[part](found))
    write_page(options.output)


if __name__ == "__main__":
    main()
