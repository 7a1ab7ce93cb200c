"""`ModelParallelStrategy("fsdp")` on Torch beside `fully_shard` by hand.

Processes train a transformer with Adam, two with a core each and four that share two
cores: in `fit` under the strategy, and the same in `torch.nn`, with `fully_shard` of
each block and of the whole, each process on its share of the rows. They take turns in
rounds. Numbers are milliseconds per step, and the bytes of a process's weights,
gradients and slots after a step.
"""

from __future__ import annotations

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
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y)
        y = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(WIDTH)(y)
    scores = layers.Dense(10)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(tokens, scores)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss)
    return model


def ours() -> tuple[Callable[[], float], Callable[[], int]]:
    """An epoch of `fit`, and the bytes of the state of this process."""
    import keras_strategies as ks

    strategy = ks.ModelParallelStrategy("fsdp", ["cpu:0"], min_shard_bytes=0)
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


def by_hand() -> tuple[Callable[[], float], Callable[[], int]]:
    """The same with `torch.nn` and `fully_shard`."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

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
                linear(y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
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

    count = dist.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    torch.manual_seed(0)
    model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    rank = dist.get_rank()
    x, y = (torch.from_numpy(part).long() for part in data())

    def epoch() -> float:
        start = time.perf_counter()
        total = 0.0
        for i in range(STEPS):
            rows = slice(i * BATCH + rank * BATCH // count, None)
            own_x, own_y = (part[rows][: BATCH // count] for part in (x, y))
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


def work(rounds: int) -> None:
    """Measures in one of the processes, and prints a line of JSON."""
    import torch

    index = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    torch.set_num_threads(1)
    contestants = {"ours": ours(), "by hand": by_hand()}
    epochs = {name: epoch for name, (epoch, _) in contestants.items()}
    found = measure(epochs, rounds)
    state = {name: size() for name, (_, size) in contestants.items()}
    print(json.dumps({"ms": found, "state": state}))


# --- In the process that a person starts --------------------------------------


def table(results: dict[str, Any]) -> str:
    """Milliseconds per step and bytes of state, as a Markdown table."""
    header = ["processes", "ours", "`fully_shard` by hand", "ours / by hand"]
    header += ["state per process, ours", "by hand"]
    rows = []
    for count, found in results.items():
        ms, state = found["ms"], found["state"]
        cells = [f"{median(ms[name]):.1f} ms" for name in ("ours", "by hand")]
        cells.append(ratio(ms["by hand"], ms["ours"]))
        cells += [f"{state[name] / 2**20:.2f} MiB" for name in ("ours", "by hand")]
        rows.append([count, *cells])
    return markdown_table(header, rows)


def main() -> None:
    from multi_worker import ranks

    parser = options_parser(__doc__, has_workers=True)
    options = parser.parse_args()
    if options.worker:
        work(options.rounds)
        return
    command = [sys.executable, __file__, "--worker", "rank"]
    command += ["--rounds", str(options.rounds)]
    results = Results(Path(options.output) / "fsdp.json")
    for count in RANKS:
        first, *_ = ranks(command, count)
        results.put(str(count), first)
    print(table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
