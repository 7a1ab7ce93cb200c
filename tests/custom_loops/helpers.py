"""Values of replicas, and steps, that tests of several files use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from keras import ops

import keras_strategies as ks


def per_replica(*parts: Any) -> ks.PerReplica:
    """A value for each replica, in float32."""
    return ks.PerReplica([ops.convert_to_tensor(np.float32(part)) for part in parts])


def numbers(value: ks.PerReplica) -> list[Any]:
    """The replicas' values, as floats or lists of them."""
    return [np.asarray(ops.convert_to_numpy(part)).tolist() for part in value.values]


def assert_alike(
    found: Iterable[Any],
    expected: Iterable[Any],
    rtol: float = 1e-4,
    atol: float | None = None,
) -> None:
    """Fails where arrays differ; by default the absolute tolerance is as large."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol, rtol if atol is None else atol)


def descend(loss_fn: Callable[[], Any], variables: list[Any], optimizer: Any) -> Any:
    """A step of a replica; its loss."""
    loss, gradients = ks.value_and_grad(loss_fn, variables)()
    optimizer.apply(gradients, variables)
    return loss
