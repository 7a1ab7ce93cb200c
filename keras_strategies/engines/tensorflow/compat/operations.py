"""Operations that fail on zero rows, random operations and their seeds, shapes."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.ops import (
    gen_nn_ops,
    gen_stateless_random_ops,
    gen_stateless_random_ops_v2,
)

from keras_strategies.engines.tensorflow.compat.workers import runtime
from keras_strategies.keras_compat.private_names import Private

_PYTHON = "tensorflow.python"

PRIVATE_NAMES = (
    Private(
        f"{_PYTHON}.eager.context",
        ("global_seed",),
        "Seeds of operations.",
    ),
    Private(
        f"{_PYTHON}.eager.context.Context",
        ("_rng",),
        "Seeds of operations.",
    ),
    Private(
        f"{_PYTHON}.ops.gen_nn_ops",
        (
            "conv2d",
            "conv2d_backprop_input",
            "conv3d",
            "conv3d_backprop_input_v2",
            "depthwise_conv2d_native",
            "max_pool",
            "max_pool3d",
            "max_pool_with_argmax",
        ),
        "Kernels that fail on a replica without rows.",
    ),
    Private(
        f"{_PYTHON}.ops.gen_stateless_random_ops",
        (
            "stateless_multinomial",
            "stateless_random_binomial",
        ),
        "Random numbers of a replica's rows.",
    ),
    Private(
        f"{_PYTHON}.ops.gen_stateless_random_ops_v2",
        (
            "stateless_random_gamma_v3",
            "stateless_random_normal_v2",
            "stateless_random_uniform_int_v2",
            "stateless_random_uniform_v2",
            "stateless_truncated_normal_v2",
        ),
        "Random numbers of a replica's rows.",
    ),
)


#: With oneDNN, a convolution of zero rows has the channels of its input, and the
#: gradient of a maximum ends the process; some of the kernels without it raise errors.
#: Types of operations by the functions that make them.
FAILING_KERNELS = {
    "conv2d": "Conv2D",
    "conv2d_backprop_input": "Conv2DBackpropInput",
    "conv3d": "Conv3D",
    "conv3d_backprop_input_v2": "Conv3DBackpropInputV2",
    "depthwise_conv2d_native": "DepthwiseConv2dNative",
    "max_pool": "MaxPool",
    "max_pool3d": "MaxPool3D",
    "max_pool_with_argmax": "MaxPoolWithArgmax",
}


def replace_failing_kernels(
    replacement: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replaces the functions that make operations which fail on zero rows.

    Args:
        replacement: callable of a function, that returns the one in its place, with
            the same arguments.
    """
    for name in FAILING_KERNELS:
        setattr(gen_nn_ops, name, replacement(getattr(gen_nn_ops, name)))


#: Functions that make the random operations of `keras.random`, by the module where
#: `tf.random.stateless_*` look them up in each call.
DRAWS = (
    (
        gen_stateless_random_ops_v2,
        (
            "stateless_random_uniform_v2",
            "stateless_random_normal_v2",
            "stateless_truncated_normal_v2",
            "stateless_random_uniform_int_v2",
            "stateless_random_gamma_v3",
        ),
    ),
    (
        gen_stateless_random_ops,
        (
            "stateless_random_binomial",
            "stateless_multinomial",
        ),
    ),
)


def replace_draws(
    replacement: Callable[[str, Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Replaces the functions that make stateless random operations.

    Args:
        replacement: callable of the name of a function and the function, that returns
            the one in its place, with the same arguments.
    """
    for module, names in DRAWS:
        for name in names:
            setattr(module, name, replacement(name, getattr(module, name)))


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`; None without one."""
    seed: int | None = eager_context.global_seed()
    return seed


def operation_seeds() -> random.Random:
    """The generator of seeds for operations, after `tf.random.set_seed`."""
    generator: random.Random = runtime()._rng
    return generator


#: Calls between `tf.shape` and the conversion of its argument, at most.
_CALLS_OF_CONVERSION = 14
_OF_SHAPE = inspect.unwrap(tf.shape).__code__


def is_read_for_shape() -> bool:
    """Whether the method that calls this converts a tensor for `tf.shape`.

    TensorFlow converts the argument first, and has no other way for a class of tensors
    to give its shape.
    """
    frame = inspect.currentframe()
    for _ in range(_CALLS_OF_CONVERSION):
        if frame is None:
            return False
        if frame.f_code is _OF_SHAPE:
            return True
        frame = frame.f_back
    return False
