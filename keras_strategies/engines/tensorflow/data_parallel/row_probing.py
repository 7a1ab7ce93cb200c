"""Probes on TensorFlow: eager layer calls on a few rows, without randomness."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from keras_strategies.engines.tensorflow import compat
from keras_strategies.engines.tensorflow.devices import tf_device
from keras_strategies.runtime.row_checks.layer_probes import LayerProbes

if TYPE_CHECKING:
    from keras_strategies.runtime.engine import StrategyCore

_INTEGERS = {
    "random_uniform_int": ("minval", 1),
    "stateless_random_uniform_int": ("minval", 2),
    "stateless_random_uniform_int_v2": ("minval", 4),
}
_FILLED = (
    "parameterized_truncated_normal",
    "random_gamma",
    "random_poisson_v2",
    "random_standard_normal",
    "random_uniform",
    "truncated_normal",
    "stateless_parameterized_truncated_normal",
    "stateless_random_binomial",
    "stateless_random_gamma_v2",
    "stateless_random_gamma_v3",
    "stateless_random_normal",
    "stateless_random_normal_v2",
    "stateless_random_poisson",
    "stateless_random_uniform",
    "stateless_random_uniform_full_int",
    "stateless_random_uniform_full_int_v2",
    "stateless_random_uniform_v2",
    "stateless_truncated_normal",
    "stateless_truncated_normal_v2",
)
_PERMUTATIONS = ("random_shuffle", "stateless_shuffle")
_CHOICES = ("multinomial", "stateless_multinomial")
# Replaces an unknown dimension while a program is traced.
_UNKNOWN_DIMENSION = 8


@dataclass
class ConstantNumbers:
    """Constant values in place of random numbers."""

    quantile: float
    drawn: bool = False

    def replace(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        thread = threading.get_ident()

        @functools.wraps(original)
        def operation(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return original(*args, **kwargs)
            self.drawn = True
            return self._result(name, original, args, kwargs)

        return operation

    def _result(
        self, name: str, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if name in _PERMUTATIONS:
            return tf.reverse(args[0] if args else kwargs["value"], [0])
        drawn = original(*args, **kwargs)
        if name in _CHOICES:
            likeliest = tf.argmax(args[0] if args else kwargs["logits"], -1)
            column = tf.cast(likeliest, drawn.dtype)[:, tf.newaxis]
            return tf.broadcast_to(column, tf.shape(drawn))
        if name in _INTEGERS:
            keyword, place = _INTEGERS[name]
            lowest = kwargs[keyword] if keyword in kwargs else args[place]
            return tf.fill(tf.shape(drawn), tf.cast(lowest, drawn.dtype))
        value = self.quantile if drawn.dtype.is_floating else 0
        return tf.fill(tf.shape(drawn), tf.cast(value, drawn.dtype))


class TensorFlowProbes(LayerProbes):
    """Eager calls on a few rows, also while a program is traced."""

    def __init__(self, strategy: StrategyCore):
        super().__init__(strategy)
        self._device = tf_device(strategy.placement.variables)
        # While a step is traced: its batch's tensors, and their first values.
        self._values: dict[int, tuple[Any, Any]] = {}

    @contextlib.contextmanager
    def tracing(self, traced: Any, batch: Any) -> Iterator[None]:
        """Entered around the tracing of a step.

        Args:
            traced: the batch in the program, a structure of tensors without values.
            batch: the first batch that it will run on.
        """
        if tf.executing_eagerly() or batch is None:
            yield
            return
        pairs = zip(tf.nest.flatten(traced), tf.nest.flatten(batch), strict=True)
        self._values = {
            id(tensor): (tensor, value)
            for tensor, value in pairs
            if isinstance(value, tf.Tensor)
        }
        try:
            yield
        finally:
            self._values = {}

    def values_of(self, tensor: Any) -> Any | None:
        if hasattr(tensor, "numpy"):
            return tensor
        _, value = self._values.get(id(tensor), (tensor, None))
        return value

    def first_rows(self, tensor: Any, rows: int | None) -> Any:
        values = self.values_of(tensor)
        if values is None:
            return _stand_in(tensor, rows)
        with tf.device(self._device):
            return tf.identity(values[:rows] if tensor.shape.rank else values)

    @contextlib.contextmanager
    def probing(self, quantile: float) -> Iterator[ConstantNumbers]:
        numbers = ConstantNumbers(quantile)
        with (
            tf.init_scope(),
            tf.device(self._device),
            # On GPUs, TF32 rounds by more than the differences that probes detect.
            _full_precision(self._device),
            _kernels_alone(self._device),
            operation_seeds_restored(),
            _replaced(numbers),
        ):
            yield numbers


@contextlib.contextmanager
def _replaced(numbers: ConstantNumbers) -> Iterator[None]:
    names = (*_FILLED, *_INTEGERS, *_PERMUTATIONS, *_CHOICES)
    before = [
        (module, name, getattr(module, name))
        for module in compat.RANDOM_OPERATIONS
        for name in names
        if hasattr(module, name)
    ]
    for module, name, original in before:
        setattr(module, name, numbers.replace(name, original))
    try:
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)


@contextlib.contextmanager
def operation_seeds_restored() -> Iterator[None]:
    """Restores operation seeds, so that checks do not change later random numbers."""
    if compat.global_seed() is None:
        yield
        return
    seeds = compat.operation_seeds()
    before = seeds.getstate()
    try:
        yield
    finally:
        seeds.setstate(before)


def _kernels_alone(device: str) -> contextlib.AbstractContextManager[None]:
    """On CPUs, runs operations as plain kernels; see `compat.kernels_alone`."""
    return contextlib.nullcontext() if "GPU" in device else compat.kernels_alone()


@contextlib.contextmanager
def _full_precision(device: str) -> Iterator[None]:
    if "GPU" not in device or not (
        tf.config.experimental.tensor_float_32_execution_enabled()
    ):
        yield
        return
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


def _stand_in(tensor: Any, rows: int | None) -> Any:
    """Substitute values, with the shape and dtype of a symbolic tensor.

    Integers are 0 and 1, which are valid indices of most tables.
    """
    shape = [size or _UNKNOWN_DIMENSION for size in tensor.shape.as_list()]
    if rows is not None:
        shape[0] = rows
    numbers = np.random.default_rng(0)
    if tensor.dtype.is_floating:
        return tf.constant(numbers.uniform(size=shape), tensor.dtype)
    if tensor.dtype.is_bool:
        return tf.ones(shape, "bool")
    return tf.constant(numbers.integers(0, 2, size=shape), tensor.dtype)
