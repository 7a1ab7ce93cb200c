"""Random numbers that are drawn in blocks of rows, each with a seed of its own.

A draw takes one seed from its generator, whatever its size, and divides axis 0 into
blocks. A replica draws only the blocks with rows of its own, so that a draw costs what
its own rows cost, and less than two blocks. Where blocks begin, and their seeds, depend
on the shape of the draw for all rows, so numbers do not depend on the replicas. They
are not those of Keras without a strategy, where a generator is one sequence for all
rows.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import keras
import torch

from keras_strategies.engines.torch.random_numbers.rows_in_memory import (
    padded_rows,
    uninitialized_rows,
)
from keras_strategies.keras_compat.random_draws import next_seed
from keras_strategies.keras_compat.thread_state import current_torch_device
from keras_strategies.runtime.random_numbers.keras_draws import KerasDraw
from keras_strategies.runtime.random_numbers.row_draws import OwnRows, RowDraws

#: Numbers in a block, at least. A seed costs as much as some hundred numbers on a CPU,
#: and a kernel as much as some hundred thousand on an accelerator.
_CPU_BLOCK, _ACCELERATOR_BLOCK = 2**15, 2**20
_WORD = 2**64 - 1
# Held by functions of Keras that set the process's generator, and restore it.
_lock = threading.Lock()
_seeds: contextvars.ContextVar[torch.Generator | None] = contextvars.ContextVar(
    "seeds", default=None
)
#: Makes the draws of a call that is traced, of which a program is compiled.
traced_draws: contextvars.ContextVar[Callable[[KerasDraw], Any] | None] = (
    contextvars.ContextVar("traced_draws", default=None)
)


class ReplicaSeeds:
    """The seeds of draws without a generator, for replicas that run at the same time.

    Each replica takes those that one device would take from the process's generator,
    from a copy of it.

    Args:
        count: int, how many replicas there are.
    """

    def __init__(self, count: int):
        state = torch.default_generator.get_state()
        self._copies = [torch.Generator().set_state(state) for _ in range(count)]

    @contextlib.contextmanager
    def of_replica(self, replica_id: int) -> Iterator[None]:
        """Context in which a replica draws."""
        token = _seeds.set(self._copies[replica_id])
        try:
            yield
        finally:
            _seeds.reset(token)

    def __enter__(self) -> None:
        """Entered around the calls of the replicas."""

    def __exit__(self, *error: Any) -> None:
        # The state of the first replica is that of one device, also after an error.
        torch.default_generator.set_state(self._copies[0].get_state())


@dataclass(frozen=True)
class _Block:
    """Entries of axis 0 with one seed.

    Args:
        first: int, the first entry.
        count: int, how many there are.
        seed: int.
        before: int, entries before those of the replica.
        own: int, entries of the replica.
    """

    first: int
    count: int
    seed: int
    before: int
    own: int

    def of_replica(self, drawn: torch.Tensor) -> torch.Tensor:
        """The entries of the replica in what is drawn for the block."""
        if self.own == self.count:
            return drawn
        # A copy, so that the rest is freed.
        return drawn.narrow(0, self.before, self.own).clone()


def block_draw(draw: KerasDraw, draws: RowDraws) -> Any:
    """What a function of `keras.random` draws, of a replica's rows.

    Args:
        draw: the call, with the replica's number of rows.
        draws: the draws of the replica.
    """
    traced = traced_draws.get()
    if traced is not None:
        return traced(draw)
    rows = draws.next_draw(draw.length)
    if current_torch_device() == "meta":
        return draw.call()  # Shapes only.
    drawn = drawn_of_rows(draw, rows, seed_of(draw))
    return draw.given["inputs"] * drawn if has_factors(draw) else drawn


def has_factors(draw: KerasDraw) -> bool:
    """Whether numbers are drawn as factors of the inputs: for a dropout with axes."""
    return draw.name == "dropout" and draw.length is not None


def drawn_of_rows(draw: KerasDraw, rows: OwnRows | None, seed: int) -> torch.Tensor:
    """What a draw with a seed gives for a replica's rows.

    Args:
        draw: the call, with the replica's number of rows.
        rows: the entries of axis 0; None if all rows share the draw.
        seed: int, see `seed_of`.

    Returns:
        The numbers; of a dropout a factor for each entry.
    """
    length = draw.length
    if length is None:
        return _called(draw, {"seed": _mixed(seed, 0)})
    rows = rows or OwnRows(0, length, length)
    if has_factors(draw):
        return _factors(draw, rows, seed)
    device = keras.ops.zeros(0).device
    blocks = _blocks(rows, _block_size(draw, rows, device), seed)
    parts = [block.of_replica(_drawn(draw, rows, block)) for block in blocks]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def seed_of(draw: KerasDraw) -> int:
    """The next seed, from the generator that Keras draws from.

    A dropout without a seed has Torch's generator on the host: on an accelerator, the
    state of a `SeedGenerator` would be a value that the host waits for.
    """
    if not draw.is_unseeded_dropout:
        return next_seed(draw.given.get("seed"))
    drawn = torch.empty((), dtype=torch.int64, device="cpu")
    return int(drawn.random_(generator=_seeds.get()))


def _blocks(rows: OwnRows, size: int, seed: int) -> Iterator[_Block]:
    """The blocks with rows of the replica; one of another row if it has none."""
    end = rows.before + rows.own
    if not rows.own:  # Torch's distributions refuse to draw nothing.
        yield _Block(rows.before, 1, seed, 0, 0)
    for number in range(rows.before // size, -(-end // size) if rows.own else 0):
        first = number * size
        last = min(first + size, rows.total)
        start, stop = max(first, rows.before), min(last, end)
        yield _Block(
            first, last - first, _mixed(seed, number), start - first, stop - start
        )


def _block_size(draw: KerasDraw, rows: OwnRows, device: torch.device) -> int:
    """Entries of axis 0; a power of two, or all of them."""
    if draw.draws_by_parameters:
        return 1
    wanted = _CPU_BLOCK if device.type == "cpu" else _ACCELERATOR_BLOCK
    numbers = max(math.prod(map(int, draw.shape[1:])), 1)
    size = 1 << max(math.ceil(math.log2(wanted / numbers)), 0)
    return min(size, max(int(rows.total), 1))


def _start(rows: OwnRows, block: _Block) -> int:
    """The first entry of a block among those of the replica."""
    return int(block.first + block.before - rows.before)


def _drawn(draw: KerasDraw, rows: OwnRows, block: _Block) -> torch.Tensor:
    """What is drawn for a block; ones stand for parameters of other replicas' rows."""
    rank = len(draw.shape)

    def part(value: Any) -> Any:
        is_of_rows = isinstance(value, torch.Tensor) and value.ndim == rank
        if not is_of_rows or len(value) != rows.own:
            return value
        own = value.narrow(0, _start(rows, block), block.own)
        return padded_rows(own, OwnRows(block.before, block.own, block.count))

    return _called(draw, {**draw.of_rows(block.count, part), "seed": block.seed})


def _called(draw: KerasDraw, given: dict[str, Any]) -> torch.Tensor:
    if not draw.draws_by_parameters:
        return draw.call(**given)  # type: ignore[no-any-return]
    with _lock:
        return draw.call(**given)  # type: ignore[no-any-return]


def like_factors(draw: KerasDraw) -> torch.Tensor:
    """A tensor with the shape and order of memory of the noise of a dropout."""
    inputs: torch.Tensor = draw.given["inputs"]
    if tuple(draw.shape) == tuple(inputs.shape):
        return inputs
    return inputs.new_empty(tuple(draw.shape))


def _factors(draw: KerasDraw, rows: OwnRows, seed: int) -> torch.Tensor:
    """The factors of a dropout, for each entry of the noise."""
    inputs, rate = draw.given["inputs"], draw.given["rate"]
    with torch.no_grad():
        like = like_factors(draw)
        factors = uninitialized_rows(like, rows.own)
        generator = torch.Generator(inputs.device)
        for block in _blocks(rows, _block_size(draw, rows, inputs.device), seed):
            own = factors.narrow(0, _start(rows, block), block.own)
            drawn = own
            if block.own < block.count or not own.is_contiguous():
                drawn = uninitialized_rows(like, block.count)
            drawn.bernoulli_(1 - rate, generator=generator.manual_seed(block.seed))
            if drawn is not own:
                own.copy_(block.of_replica(drawn))
        factors.div_(1 - rate)
    return factors  # type: ignore[no-any-return]


def _mixed(seed: int, number: int) -> int:
    """The seed of a block: a step of SplitMix64 (Steele, Lea and Flood, 2014).

    It has 31 bits, as an int that Keras takes for a seed.
    """
    word = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return (word ^ (word >> 31)) >> 33
