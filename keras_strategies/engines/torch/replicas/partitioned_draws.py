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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from keras_strategies.engines.torch.replicas.draw_functions import (
    IN_PLACE,
    OF_PARAMETERS,
    SIZED,
    Function,
    first_tensor,
    has_generator,
    is_of_tensors,
    length_of,
    mixes_axis_0,
    size_of,
    with_rows,
)
from keras_strategies.engines.torch.replicas.replica_generators import (
    generator_of,
)
from keras_strategies.engines.torch.replicas.rows_in_memory import (
    padded_rows,
    uninitialized_rows,
)
from keras_strategies.runtime.data_parallel.row_draws import OwnRows, RowDraws

#: Numbers in a block, at least. A seed costs as much as some hundred numbers on a CPU,
#: and a kernel as much as some hundred thousand on an accelerator.
_CPU_BLOCK, _ACCELERATOR_BLOCK = 2**15, 2**20
_WORD = 2**64 - 1
# Held while a function draws from the process's generator.
_lock = threading.Lock()
_seeds: contextvars.ContextVar[torch.Generator | None] = contextvars.ContextVar(
    "seeds", default=None
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


def partitioned_draw(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any], draws: RowDraws
) -> Any:
    """What a function draws, of a replica's rows.

    Args:
        func: a function for which `is_draw` is true.
        args: its arguments.
        kwargs: its keyword arguments.
        draws: the draws of the replica.
    """
    kwargs = dict(kwargs)
    if is_of_tensors(func, args, kwargs) or func is torch.binomial:
        args, kwargs = _broadcast(args, kwargs)
    length = length_of(func, args, kwargs)
    rows = draws.next_draw(length)
    device = _device_of(func, args, kwargs)
    if device.type == "meta":
        return func(*args, **kwargs)  # Shapes only.
    given = (*args, kwargs.pop("generator", None))
    args = [each for each in args if not isinstance(each, torch.Generator)]
    generators = (each for each in given if isinstance(each, torch.Generator))
    seed = _next_seed(next(generators, None))
    out, is_leaf = kwargs.pop("out", None), kwargs.pop("requires_grad", False)
    if rows is None and length is not None:
        rows = OwnRows(0, length, length)
    drawn = _Draw(func, args, kwargs, rows, device, seed).result()
    if out is not None:
        return out.resize_(drawn.shape).copy_(drawn)
    return drawn.requires_grad_() if is_leaf else drawn


class _Draw:
    """One draw.

    Args:
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        rows: the entries of axis 0; None if it is not divided.
        device: the device of the result.
        seed: int, the seed of the draw.
    """

    def __init__(
        self,
        func: Function,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        rows: OwnRows | None,
        device: torch.device,
        seed: int,
    ):
        self._func = func
        self._args = args
        self._kwargs = kwargs
        self._is_sized = func in SIZED and not is_of_tensors(func, args, kwargs)
        self._is_undivided = rows is None
        # Dropout of rows is drawn by `bernoulli_`.
        is_dropout = func is functional.dropout and not self._is_undivided
        self._has_generator = is_dropout or has_generator(func)
        self._rows = rows or OwnRows(0, 1, 1)
        self._device = device
        self._seed = seed
        self._generator = (
            torch.Generator(device) if self._has_generator else generator_of(device)
        )

    def result(self) -> Any:
        """The entries of the replica."""
        func = self._func
        with self._process_generator():
            if self._is_undivided:
                return self._call(self._args, self._kwargs, _mixed(self._seed, 0))
            if func in IN_PLACE:
                return self._in_place()
            if func is functional.dropout:
                return self._dropout(*self._args, **self._kwargs)
            parts = [self._block(block) for block in self._blocks()]
        if isinstance(parts[0], tuple):
            columns = zip(*parts, strict=True)
            return tuple(c[0] if c[0] is None else _joined(c) for c in columns)
        return _joined(parts)

    # Blocks.

    def _blocks(self) -> Iterator[_Block]:
        """The blocks with rows of the replica; an empty one if it has none."""
        rows = self._rows
        size = self._block_size()
        end = rows.before + rows.own
        if not rows.own:
            yield _Block(rows.before, 0, self._seed, 0, 0)
        for number in range(rows.before // size, -(-end // size) if rows.own else 0):
            first = number * size
            last = min(first + size, rows.total)
            start, stop = max(first, rows.before), min(last, end)
            yield _Block(
                first,
                last - first,
                _mixed(self._seed, number),
                start - first,
                stop - start,
            )

    def _start(self, block: _Block) -> int:
        """The first entry of a block among those of the replica."""
        return block.first + block.before - self._rows.before

    def _block_size(self) -> int:
        """Entries of axis 0; a power of two, or all of them."""
        func, args, kwargs = self._func, self._args, self._kwargs
        total = max(int(self._rows.total), 1)
        if func is torch.randperm:
            return total
        if not self._is_sized and mixes_axis_0(func, args, kwargs):
            return total
        if func in OF_PARAMETERS:
            return 1  # How many numbers a row takes depends on its parameters.
        wanted = _CPU_BLOCK if self._device.type == "cpu" else _ACCELERATOR_BLOCK
        numbers = max(math.prod(self._shape()[1:]), 1)
        return min(1 << max(math.ceil(math.log2(wanted / numbers)), 0), total)

    def _shape(self) -> Sequence[int]:
        func, args, kwargs = self._func, self._args, self._kwargs
        if self._is_sized:
            return size_of(func, args, kwargs)
        return first_tensor(args, kwargs).shape

    def _block(self, block: _Block) -> Any:
        args: Sequence[Any]
        if self._is_sized:
            args, kwargs = with_rows(self._func, self._args, self._kwargs, block.count)
        else:
            args, kwargs = self._arguments_of(block)
        found = self._call(args, kwargs, block.seed)
        if isinstance(found, tuple):
            return tuple(
                each if each is None else block.of_replica(each) for each in found
            )
        return block.of_replica(found)

    def _arguments_of(self, block: _Block) -> tuple[Sequence[Any], dict[str, Any]]:
        """Arguments of a block; ones stand for rows of other replicas."""
        rank = first_tensor(self._args, self._kwargs).ndim

        def part(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.ndim != rank:
                return value
            if len(value) != self._rows.own:
                return value
            own = value.narrow(0, self._start(block), block.own)
            return padded_rows(own, OwnRows(block.before, block.own, block.count))

        return [part(each) for each in self._args], {
            name: part(each) for name, each in self._kwargs.items()
        }

    def _in_place(self) -> torch.Tensor:
        target: torch.Tensor = self._args[0]
        with torch.no_grad():
            for block in self._blocks():
                args, kwargs = self._arguments_of(block)
                drawn = uninitialized_rows(target, block.count)
                self._call([drawn, *args[1:]], kwargs, block.seed)
                own = target.narrow(0, self._start(block), block.own)
                own.copy_(block.of_replica(drawn))
        return target

    def _dropout(
        self,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        """Dropout by a factor for each entry."""
        if not 0 <= p <= 1:
            return functional.dropout(input, p, training)  # Torch's error.
        with torch.no_grad():
            factors = uninitialized_rows(input, self._rows.own)
            for block in self._blocks():
                own = factors.narrow(0, self._start(block), block.own)
                drawn = own
                if block.own < block.count or not own.is_contiguous():
                    drawn = uninitialized_rows(input, block.count)
                generator = self._generator.manual_seed(block.seed)
                drawn.bernoulli_(1 - p, generator=generator)
                if drawn is not own:
                    own.copy_(block.of_replica(drawn))
            if p < 1:
                factors.div_(1 - p)
        return input.mul_(factors) if inplace else input * factors

    # Generators.

    @contextlib.contextmanager
    def _process_generator(self) -> Iterator[None]:
        """Restores the process's generator, which some functions draw from."""
        if self._has_generator:
            yield
            return
        with _lock:
            state = self._generator.get_state()
            try:
                yield
            finally:
                self._generator.set_state(state)

    def _call(self, args: Sequence[Any], kwargs: dict[str, Any], seed: int) -> Any:
        generator = self._generator.manual_seed(seed)
        if self._has_generator:
            return self._func(*args, **kwargs, generator=generator)
        return self._func(*args, **kwargs)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def _next_seed(generator: torch.Generator | None) -> int:
    """The next seed of a generator; None is the process's, or the replica's copy."""
    generator = generator or _seeds.get()
    if generator is None or generator.device.type == "cpu":
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator))
    device = generator.device
    drawn = torch.empty((), dtype=torch.int64, device=device)
    return int(drawn.random_(generator=generator))


def _mixed(seed: int, number: int) -> int:
    """The seed of a block: a step of SplitMix64 (Steele, Lea and Flood, 2014)."""
    word = (seed + (number + 1) * 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return (word ^ (word >> 31)) >> 1


def _device_of(
    func: Function, args: Sequence[Any], kwargs: dict[str, Any]
) -> torch.device:
    """The device of what a function draws."""
    if func in SIZED and not is_of_tensors(func, args, kwargs):
        device = kwargs.get("device")
        return torch.get_default_device() if device is None else torch.device(device)
    return first_tensor(args, kwargs).device


def _broadcast(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with tensors of one shape."""
    values = [*args, *kwargs.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))

    def expanded(value: Any) -> Any:
        return value.expand(shape) if isinstance(value, torch.Tensor) else value

    return [expanded(each) for each in args], {
        name: expanded(each) for name, each in kwargs.items()
    }
