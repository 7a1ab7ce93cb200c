"""`ModelParallelStrategy` on Torch beside `fully_shard` and `parallelize_module`.

Processes train a transformer with Adam, two with a core each and four that share two
cores: in `fit` under the strategy, and the same in `torch.nn` by hand, with
`fully_shard` of each block and of the whole, each process on its share of the rows.
They take turns in rounds. Numbers are milliseconds per step, and the bytes of a
process's weights, gradients and slots after a step.

With a model axis (`benchmarks/model_parallel.py`) the layouts are those of Shoeybi et
al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism" (2019); by hand they are a plan of `parallelize_module`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from measuring import Results, epoch_timer, measure, options_parser, ratio
from page import write_page
from tables import markdown_table

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 1000, 64, 128, 4, 4
BATCH, STEPS = 32, 8
RANKS = (2, 4)


# --- In the measuring processes -----------------------------------------------


def data() -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    x = random.integers(0, VOCABULARY, (BATCH * STEPS, LENGTH)).astype("int32")
    return x, random.integers(0, 10, BATCH * STEPS)


def keras_model() -> Any:
    import keras
    from keras import layers

    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, name="embedding")(tokens)
    for i in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * WIDTH, "gelu", name=f"up{i}")(y)
        x = x + layers.Dense(WIDTH, name=f"down{i}")(y)
    scores = layers.Dense(10, name="scores")(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(tokens, scores)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    return model


def megatron(data_axis: str | None) -> dict[str, tuple[str | None, ...]]:
    """Layouts with heads and hidden units along the model axis.

    Args:
        data_axis: the axis of another dimension; None for none.
    """
    data = data_axis
    return {
        "embedding/embeddings": ("model", data),
        ".*/(query|key|value)/kernel": (data, "model"),
        ".*/(query|key|value)/bias": ("model", data),
        ".*/attention_output/kernel": ("model", None, data),
        "up./kernel": (data, "model"),
        "up./bias": ("model",),
        "down./kernel": ("model", data),
        ".*/(gamma|beta)|(.*/attention_output|down.|scores)/bias": (data,),
        "scores/kernel": (data,),
    }


def ours(model_axis: int = 1) -> tuple[Callable[[], float], Callable[[], int]]:
    """An epoch of `fit`, and the bytes of the state of this process.

    Args:
        model_axis: int, the processes along it.
    """
    import keras_strategies as ks

    count = int(os.environ["WORLD_SIZE"])
    layouts = (
        "fsdp" if model_axis == 1 else megatron("batch" if count > model_axis else None)
    )
    smallest = 0 if layouts == "fsdp" else None
    strategy = ks.ModelParallelStrategy(
        layouts, ["cpu:0"], model_axis, min_shard_bytes=smallest
    )
    with strategy.scope():
        model = keras_model()
    x, y = data()
    timer = epoch_timer()

    def epoch() -> float:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[timer])
        return timer.seconds / STEPS * 1000

    def state() -> int:
        weights = [v.value for v in model.trainable_variables]
        slots = [v.value for v in model.optimizer.variables]
        return sum(map(_own_bytes, [*weights, *(w.grad for w in weights), *slots]))

    return epoch, state


def by_hand(model_axis: int = 1) -> tuple[Callable[[], float], Callable[[], int]]:
    """The same with `torch.nn`, `fully_shard` and `parallelize_module`."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.query, self.key, self.value, self.out = (
                nn.Linear(WIDTH, WIDTH) for _ in range(4)
            )
            self.up, self.down = (
                nn.Linear(WIDTH, 4 * WIDTH),
                nn.Linear(4 * WIDTH, WIDTH),
            )

        def forward(self, x: Any) -> Any:
            y = self.first(x)
            parts = (
                linear(y).unflatten(-1, (HEADS // model_axis, -1)).transpose(1, 2)
                for linear in (self.query, self.key, self.value)
            )
            y = nn.functional.scaled_dot_product_attention(*parts)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(nn.functional.gelu(self.up(self.second(x))))

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.scores = nn.Linear(WIDTH, 10)

        def forward(self, x: Any) -> Any:
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
            return self.scores(x.mean(1))

    parts = dist.get_world_size() // model_axis
    mesh = init_device_mesh(
        "cpu", (parts, model_axis), mesh_dim_names=("batch", "model")
    )
    torch.manual_seed(0)
    model = Transformer()
    if model_axis > 1:
        rows = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh["model"], {"embedding": rows})
    for block in model.blocks:
        if model_axis > 1:
            plan: dict[str, Any] = {
                name: ColwiseParallel() for name in ("query", "key", "value", "up")
            }
            plan |= {name: RowwiseParallel() for name in ("out", "down")}
            parallelize_module(block, mesh["model"], plan)
        if parts > 1:
            fully_shard(block, mesh=mesh["batch"])
    if parts > 1:
        fully_shard(model, mesh=mesh["batch"])
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    place = mesh["batch"].get_local_rank()
    x, y = (torch.from_numpy(part).long() for part in data())

    def epoch() -> float:
        start = time.perf_counter()
        total = 0.0
        for i in range(STEPS):
            rows = slice(i * BATCH + place * BATCH // parts, None)
            own_x, own_y = (part[rows][: BATCH // parts] for part in (x, y))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(own_x), own_y)
            loss.backward()
            optimizer.step()
            # `fit` shows the loss of all rows after each step.
            shown = loss.detach()
            dist.all_reduce(shown)
            total += float(shown)
        return (time.perf_counter() - start) / STEPS * 1000

    def state() -> int:
        weights = list(model.parameters())
        slots = [
            value
            for weight in weights
            for value in optimizer.state[weight].values()
            if torch.is_tensor(value)
        ]
        return sum(map(_own_bytes, [*weights, *(w.grad for w in weights), *slots]))

    return epoch, state


def _own_bytes(tensor: Any) -> int:
    """Bytes of a tensor's part in this process."""
    if tensor is None:
        return 0
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(own.numel() * own.element_size())


def work(rounds: int, model_axis: int) -> None:
    """Measures in one of the processes, and prints a line of JSON."""
    import torch

    index = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    torch.set_num_threads(1)
    contestants = {"ours": ours(model_axis), "by hand": by_hand(model_axis)}
    epochs = {name: epoch for name, (epoch, _) in contestants.items()}
    found = measure(epochs, rounds)
    state = {name: size() for name, (_, size) in contestants.items()}
    print(json.dumps({"ms": found, "state": state}))


# --- In the process that a person starts --------------------------------------


def measured(rounds: int, count: int, model_axis: int = 1) -> Any:
    """What some processes measure.

    Args:
        rounds: int.
        count: int, the processes.
        model_axis: int, those along the model axis.
    """
    from two_workers import ranks

    command = [sys.executable, __file__, "--worker", "rank"]
    command += ["--rounds", str(rounds), "--model-axis", str(model_axis)]
    first, *_ = ranks(command, count)
    return first


def rows_table(results: dict[str, Any], first: str, peer: str) -> str:
    """Milliseconds per step and bytes of state, as a Markdown table.

    Args:
        results: what was measured, by row.
        first: the header of the rows.
        peer: what ours is compared with.
    """
    header = [first, "ours", peer, "ours / by hand"]
    header += ["state per process, ours", "by hand"]
    rows = []
    for name, found in results.items():
        ms, state = found["ms"], found["state"]
        cells = [f"{median(ms[each]):.1f} ms" for each in ("ours", "by hand")]
        cells.append(ratio(ms["by hand"], ms["ours"]))
        cells += [f"{state[each] / 2**20:.2f} MiB" for each in ("ours", "by hand")]
        rows.append([name, *cells])
    return markdown_table(header, rows)


def table(results: dict[str, Any]) -> str:
    """The table of the layout `"fsdp"`."""
    return rows_table(results, "processes", "`fully_shard` by hand")


def main() -> None:
    parser = options_parser(__doc__, has_workers=True)
    parser.add_argument("--model-axis", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.rounds, options.model_axis)
        return
    results = Results(Path(options.output) / "fsdp.json")
    for count in RANKS:
        results.put(str(count), measured(options.rounds, count))
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
