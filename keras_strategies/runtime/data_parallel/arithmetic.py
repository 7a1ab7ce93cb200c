"""Arithmetic of a computation, which decides whether it is split over CPU devices.

Splitting small operations over virtual devices of one CPU does not pay: on Torch
replicas share the Python interpreter, on JAX each step waits for all-reduces. Over two
virtual CPUs, a ten-layer perceptron of 64 units trains at half the speed of one device,
a convolutional network at 1.8 times its speed.

The decision depends on shapes alone and never on a clock, so that a seeded run
draws the same random numbers every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from keras_strategies.runtime.placement import Placement

# About 20 microseconds at tens of GFLOP/s of one core: the overhead of an operation in
# the interpreter on Torch, or its share of an all-reduce on JAX.
MIN_FLOPS_PER_OPERATION = 1_000_000


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic of a computation on a global batch.

    Args:
        flops: float, floating-point operations of matrix products and convolutions.
        operations: int, tensor operations of any kind.
    """

    flops: float
    operations: int

    def per_operation(self, replicas: int) -> float:
        """FLOPs of an operation on one replica's rows, on average."""
        return self.flops / replicas / max(1, self.operations)

    def worth_splitting(self, replicas: int) -> bool:
        """Whether replicas take less time than one device."""
        return self.per_operation(replicas) >= MIN_FLOPS_PER_OPERATION


def unsplit_reason(placement: Placement) -> str:
    """Why one device computes a call, for reports."""
    return (
        f"{placement.variables} computes alone: less than "
        f"{MIN_FLOPS_PER_OPERATION:,} FLOPs per operation and replica"
    )
