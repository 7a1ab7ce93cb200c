"""Reproducible random numbers for each replica thread.

Torch has one generator per device for the whole process. Threads would draw from it in
the order in which they are scheduled, so a seed would not make results reproducible.
On a replica, random functions therefore draw from a separate generator, seeded with one
number from the process's generator plus the replica's number. The number is drawn when
the first replica needs it, so that a layer without randomness does not change the state
of the process's generator, which shuffling uses too.

Intercepting every function of torch takes 4 % of the time of a small transformer. So it
is done in the first call of a layer or function, and in later calls if the first one
drew random numbers.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from keras_strategies.engines.torch.compat import (
    RANDOM_FUNCTIONS,
    default_mps_generator,
)
from keras_strategies.engines.torch.devices import device_of_call, torch_device
from keras_strategies.runtime.placement import Placement

# Functions that take a `generator`.
_DRAWS = frozenset(
    [
        torch.bernoulli,
        torch.binomial,
        torch.multinomial,
        torch.normal,
        torch.poisson,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        *RANDOM_FUNCTIONS,
        torch.Tensor.bernoulli_,
        torch.Tensor.cauchy_,
        torch.Tensor.exponential_,
        torch.Tensor.geometric_,
        torch.Tensor.log_normal_,
        torch.Tensor.normal_,
        torch.Tensor.random_,
        torch.Tensor.uniform_,
    ]
)
# Random functions without a `generator` argument.
_WITHOUT_GENERATOR = frozenset(
    [
        torch.rand_like,
        torch.randint_like,
        torch.randn_like,
        torch.rrelu,
        torch.nn.functional.alpha_dropout,
        torch.nn.functional.dropout1d,
        torch.nn.functional.dropout2d,
        torch.nn.functional.dropout3d,
        torch.nn.functional.feature_alpha_dropout,
        torch.nn.functional.gumbel_softmax,
        torch.nn.functional.multi_head_attention_forward,
        torch.nn.functional.rrelu,
        torch.nn.functional.scaled_dot_product_attention,
    ]
)
_dropout = torch.nn.functional.dropout
# For these functions, one replica at a time uses the process's generator.
_generator_lock = threading.Lock()


class ReplicaRandom:
    """Shared seed of the replicas of one computation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seed: int | None = None

    @property
    def was_used(self) -> bool:
        """Whether a replica has drawn."""
        return self._seed is not None

    def seed(self) -> int:
        with self._lock, _generator_lock:
            if self._seed is None:
                self._seed = int(torch.randint(0, 2**62, (), device="cpu"))
            return self._seed

    def numbers(self, replica_id: int) -> contextlib.AbstractContextManager[Any]:
        """Context manager for the thread of a replica."""
        return OwnRandomNumbers(self, replica_id)


class NoRandom(ReplicaRandom):
    """For computations without random numbers."""

    def numbers(self, replica_id: int) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()


class RandomCalls:
    """Records which layers and functions draw random numbers.

    Args:
        placement: the replicas.
    """

    def __init__(self, placement: Placement) -> None:
        self._draws: weakref.WeakKeyDictionary[Any, dict[Any, bool]] = (
            weakref.WeakKeyDictionary()
        )
        self._first = placement.replica_counts.first
        devices = dict.fromkeys(map(torch_device, placement.replicas))
        self._accelerators = [device for device in devices if device.type != "cpu"]

    @contextlib.contextmanager
    def call(self, owner: Any, variant: Any) -> Iterator[ReplicaRandom]:
        """Context manager around a call on all replicas.

        Args:
            owner: the called layer or function.
            variant: hashable, flags such as `training` that affect it.
        """
        known = self._draws.setdefault(owner, {})
        random = ReplicaRandom() if known.get(variant, True) else NoRandom()
        before = torch.default_generator.get_state()
        with self._separate_accelerators(before) as was_drawn_on:
            yield random
        # A layer may draw in a later call only: by a schedule, or in a rare branch.
        known[variant] = (
            random.was_used
            or was_drawn_on()
            or not torch.equal(before, torch.default_generator.get_state())
        )

    @contextlib.contextmanager
    def _separate_accelerators(
        self, state: torch.Tensor
    ) -> Iterator[Callable[[], bool]]:
        """Seeds the generators of accelerators apart, for draws that are not found.

        A seed of the process is that of each accelerator, so that replicas would draw
        the same numbers from them.

        Args:
            state: the state of the process's generator, which it does not change.

        Returns:
            A callable that returns, at the end, whether an accelerator has drawn.
        """
        if not self._accelerators:
            yield lambda: False
            return
        own = torch.Generator(device="cpu")
        own.set_state(state)
        seed = int(torch.randint(0, 2**62, (), generator=own, device="cpu"))
        generators = list(map(_process_generator, self._accelerators))
        before = [generator.get_state() for generator in generators]
        for i, generator in enumerate(generators):
            generator.manual_seed(seed + self._first + i)
        seeded = [generator.get_state() for generator in generators]
        was_drawn = False
        try:
            yield lambda: was_drawn
        finally:
            after = [generator.get_state() for generator in generators]
            was_drawn = not all(map(torch.equal, seeded, after))
            for generator, earlier in zip(generators, before, strict=True):
                generator.set_state(earlier)
            if was_drawn:  # The next call has another seed.
                torch.randint(0, 2**62, (), device="cpu")


class OwnRandomNumbers(TorchFunctionMode):
    """Function mode of a replica's thread: draws from its own generators.

    Args:
        random: the state that the replicas share.
        replica_id: int, the number of the replica.
    """

    def __init__(self, random: ReplicaRandom, replica_id: int):
        super().__init__()
        self._random = random
        self._replica_id = replica_id
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS:
            if kwargs.get("generator") is None:
                kwargs = {**kwargs, "generator": self._generator(args, kwargs)}
        elif func is _dropout:
            return self._dropout(*args, **kwargs)
        elif func in _WITHOUT_GENERATOR:
            return self._draw(func, args, kwargs)
        return func(*args, **kwargs)

    def _generator(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Generator:
        device = device_of_call(args, kwargs)
        if device not in self._generators:
            seed = self._random.seed() + self._replica_id
            self._generators[device] = torch.Generator(device=device).manual_seed(seed)
        return self._generators[device]

    def _dropout(
        self,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not training or not 0 < p < 1 or inplace or input.device.type == "meta":
            return _dropout(input, p, training, inplace)
        kept = torch.empty_like(input, requires_grad=False).bernoulli_(
            1 - p, generator=self._generator((input,), {})
        )
        return input * kept.div_(1 - p)

    def _draw(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention and not (
            kwargs.get("dropout_p") or (len(args) > 4 and args[4])
        ):
            return func(*args, **kwargs)
        own = self._generator(args, kwargs)
        process = _process_generator(own.device)
        with _generator_lock:
            before = process.get_state()
            process.set_state(own.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                own.set_state(process.get_state())
                process.set_state(before)


def _process_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return default_mps_generator()
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found
