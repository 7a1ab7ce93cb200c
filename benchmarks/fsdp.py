"""`ModelParallelStrategy` on Torch beside `fully_shard` and `parallelize_module`.

Processes train a transformer with Adam, two with a core each and four that share two
cores: in `fit` under the strategy, and the same in `torch.nn` by hand, with
`fully_shard` of each block and of the whole, each process on its share of the rows.
They take turns in rounds. Numbers are milliseconds per step, and the bytes of a
process's weights, gradients and slots after a step.

Both begin with the same weights, and their first epoch has to have the same losses.

The peak of a step is measured by itself, with wider blocks: the state of a process, and
the most that is resident in an epoch above what stays (`VmHWM`). The allocator of the C
library is told to map all that has 64 KB, so that it keeps no freed memory.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from measuring import Results, epoch_timer, measure, names, options_parser, ratio
from page import write_page
from tables import markdown_table

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 1000, 64, 128, 4, 4
BATCH, STEPS = 32, 8
# Small: differences by rounding do not grow in an epoch.
LEARNING_RATE = 1e-5
RANKS = (2, 4)
#: Of the larger model, whose memory is measured too: its weights have 53 MB.
WIDE = 512


# --- In the measuring processes -----------------------------------------------


def data() -> tuple[Any, Any]:
    import numpy as np

    random = np.random.default_rng(0)
    x = random.integers(0, VOCABULARY, (BATCH * STEPS, LENGTH)).astype("int32")
    return x, random.integers(0, 10, BATCH * STEPS)


def keras_model(width: int) -> Any:
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, width, name="embedding")(tokens)
    for i in range(BLOCKS):
        y = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(HEADS, width // HEADS)(y, y)
        y = layers.LayerNormalization()(x)
        y = layers.Dense(4 * width, "gelu", name=f"up{i}")(y)
        x = x + layers.Dense(width, name=f"down{i}")(y)
    scores = layers.Dense(10, name="scores")(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(tokens, scores)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(LEARNING_RATE), loss)
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


@dataclass
class Contestant:
    """Training of one model.

    Args:
        epoch: returns the milliseconds of a step.
        state: returns the bytes of the state of this process.
        losses: of the first batches, all epochs after each other, as means over the
            batches of an epoch until then.
        weights: the full values before the first step; without those of its peer.
    """

    epoch: Callable[[], float]
    state: Callable[[], int]
    losses: list[float]
    weights: Sequence[Any] = ()


def ours(model_axis: int = 1, width: int = WIDTH) -> Contestant:
    """`fit` under the strategy.

    Args:
        model_axis: int, the processes along it.
        width: int, the numbers of a token.
    """
    import keras

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
        model = keras_model(width)
    weights = model.get_weights()
    x, y = data()
    timer = epoch_timer()
    losses: list[float] = []
    noted = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda _, logs: losses.append(logs["loss"])
    )

    def epoch() -> float:
        # Only in the first epoch, whose time does not count.
        callbacks = [timer] if losses else [timer, noted]
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=callbacks)
        return timer.seconds / STEPS * 1000

    def state() -> int:
        weights = [v.value for v in model.trainable_variables]
        slots = [v.value for v in model.optimizer.variables]
        return sum(map(_own_bytes, [*weights, *(w.grad for w in weights), *slots]))

    return Contestant(epoch, state, losses, weights)


def by_hand(
    weights: Sequence[Any], model_axis: int = 1, width: int = WIDTH
) -> Contestant:
    """The same with `torch.nn`, `fully_shard` and `parallelize_module`.

    Args:
        weights: the full values of those of `ours`, in their order.
        model_axis: int, the processes along it.
        width: int, the numbers of a token.
    """
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
            # In the order of Keras's weights, with its epsilon.
            self.first = nn.LayerNorm(width, eps=1e-3)
            self.query, self.key, self.value, self.out = (
                nn.Linear(width, width) for _ in range(4)
            )
            self.second = nn.LayerNorm(width, eps=1e-3)
            self.up = nn.Linear(width, 4 * width)
            self.down = nn.Linear(4 * width, width)

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
            self.embedding = nn.Embedding(VOCABULARY, width)
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.scores = nn.Linear(width, 10)

        def forward(self, x: Any) -> Any:
            x = self.embedding(x)
            for block in self.blocks:
                x = block(x)
            return self.scores(x.mean(1))

    parts = dist.get_world_size() // model_axis
    mesh = init_device_mesh(
        "cpu", (parts, model_axis), mesh_dim_names=("batch", "model")
    )
    model = Transformer()
    given = iter(map(torch.from_numpy, weights))
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                value = next(given)
                if isinstance(module, nn.Linear) and parameter.ndim == 2:
                    value = value.reshape(module.in_features, module.out_features).T
                parameter.copy_(value.reshape(parameter.shape))
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
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, eps=1e-7)
    place = mesh["batch"].get_local_rank()
    x, y = (torch.from_numpy(part).long() for part in data())
    losses: list[float] = []

    def epoch() -> float:
        start = time.perf_counter()
        is_first = not losses
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
            total += float(shown) / dist.get_world_size()
            if is_first:
                losses.append(total / (i + 1))
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

    return Contestant(epoch, state, losses)


def _own_bytes(tensor: Any) -> int:
    """Bytes of a tensor's part in this process."""
    if tensor is None:
        return 0
    own = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(own.numel() * own.element_size())


def check_losses(found: Sequence[float], expected: Sequence[float]) -> None:
    """Raises an error if two contestants have not computed the same.

    Args:
        found: the losses of the first epoch of one.
        expected: those of the other.
    """
    import numpy as np

    # Of equal weights: rounding. Later ones differ by the epsilon of Adam, too, which
    # Keras does not divide by the correction of the second moment.
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def work(rounds: int, model_axis: int, width: int, is_memory: bool) -> None:
    """Measures in one of the processes, and prints a line of JSON."""
    import torch

    index = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[index % len(cores)]})
    torch.set_num_threads(1)
    own = ours(model_axis, width)
    peer = by_hand(own.weights, model_axis, width)
    own.weights = ()
    contestants = {"ours": own, "by hand": peer}
    if is_memory:
        print(json.dumps({name: step_peak(each) for name, each in contestants.items()}))
    else:
        epochs = {name: each.epoch for name, each in contestants.items()}
        found = measure(epochs, rounds)
        state = {name: each.state() for name, each in contestants.items()}
        print(json.dumps({"ms": found, "state": state}))
    check_losses(own.losses, peer.losses)


def step_peak(contestant: Contestant) -> int:
    """Bytes of the state, and the most of a step above what stays of an epoch."""
    # Of the tests.
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "multi_worker"))
    from memory_peaks import above_what_stays

    contestant.epoch()
    above = above_what_stays(contestant.epoch)
    return contestant.state() + above


# --- In the process that a person starts --------------------------------------


def measured(rounds: int, count: int, model_axis: int = 1, width: int = WIDTH) -> Any:
    """What some processes measure.

    Args:
        rounds: int.
        count: int, the processes.
        model_axis: int, those along the model axis.
        width: int, of the model's blocks.
    """
    from two_workers import ranks

    command = [sys.executable, __file__, "--worker", "rank"]
    command += ["--rounds", str(rounds), "--model-axis", str(model_axis)]
    command += ["--width", str(width)]
    first, *_ = ranks(command, count)
    return first


def peaks(count: int) -> dict[str, int]:
    """The peak bytes of a step of the process that needs most.

    Args:
        count: int, the processes.
    """
    from two_workers import ranks

    command = [sys.executable, __file__, "--worker", "memory", "--width", str(WIDE)]
    with mock.patch.dict(os.environ, {"MALLOC_MMAP_THRESHOLD_": str(2**16)}):
        every = ranks(command, count)
    return {name: max(each[name] for each in every) for name in every[0]}


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
    return rows_table(results, "processes, width", "`fully_shard` by hand")


def memory_table(results: dict[str, Any]) -> str:
    """Peak bytes of a step, as a Markdown table."""
    header = ["processes", "peak of a step, ours", "`fully_shard` by hand"]
    header += ["ours / by hand"]
    rows = []
    for name, found in results.items():
        own, peer = found["ours"], found["by hand"]
        sizes = [f"{size / 2**20:.0f} MiB" for size in (own, peer)]
        rows.append([name, *sizes, f"{own / peer:.2f}"])
    return markdown_table(header, rows)


def main() -> None:
    parser = options_parser(__doc__, has_workers=True)
    parser.add_argument("--model-axis", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=WIDTH, help=argparse.SUPPRESS)
    parser.add_argument("--parts", type=names, default=["times", "wide", "memory"])
    options = parser.parse_args()
    if options.worker:
        is_memory = options.worker == "memory"
        work(options.rounds, options.model_axis, options.width, is_memory)
        return
    output = Path(options.output)
    results = Results(output / "fsdp.json")
    for part, width in {"times": WIDTH, "wide": WIDE}.items():
        for count in RANKS if part in options.parts else ():
            found = measured(options.rounds, count, width=width)
            results.put(f"{count}, {width}", found)
            print(table(results.values))
    if "memory" in options.parts:
        results = Results(output / "fsdp_memory.json")
        for count in RANKS:
            results.put(str(count), peaks(count))
        print(memory_table(results.values))
    write_page(options.output)


if __name__ == "__main__":
    main()
