"""Arithmetic of a computation, which decides whether it is split over CPU devices.

Devices that are parts of one CPU gain little from small operations: on Torch replicas
take turns in the Python interpreter, on JAX each step waits for all-reduces. A
ten-layer perceptron of 64 units trains at half the speed of one device when it is split
over two virtual CPUs, a convolutional network at 1.8x.

The decision depends on shapes alone and never on a clock, so that a seeded run
draws the same random numbers every time.
"""

from __future__ import annotations

from dataclasses import dataclass

from keras_strategies.runtime.placement import Placement

# About 20 microseconds, at tens of GFLOP/s for one core: on Torch an operation's way
# through the interpreter, on JAX its share of an all-reduce.
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
