"""Errors for calls of TensorFlow's functions on another backend."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from keras_strategies.engines import backend_name
from keras_strategies.errors import ContextError
from keras_strategies.values import flatten

_REPLACEMENTS = (
    "Tensors of the {backend} backend were passed to TensorFlow. Write `ks.function` "
    "for `tf.function`, `ks.value_and_grad` for `tf.GradientTape`, "
    "`ks.compute_average_loss` for `tf.nn.compute_average_loss`, and `keras.ops` for "
    "other functions of `tf`."
)
_NUMPY = "Write `keras.ops.convert_to_numpy(x)` for `x.numpy()`; outside of `run`."


def check_not_in_tf_function(method: str) -> None:
    """Raises inside a `tf.function` if Keras uses another backend."""
    tensorflow = sys.modules.get("tensorflow")
    is_inside = getattr(tensorflow, "inside_function", None)
    if is_inside is None or backend_name() == "tensorflow" or not is_inside():
        return
    raise ContextError(
        f"`{method}` was called inside a `tf.function`, and Keras runs on the "
        f"{backend_name()} backend, which TensorFlow cannot compile. Replace "
        "`tf.function` with `ks.function`."
    )


def check_no_tensorflow_results(results: Sequence[Any]) -> None:
    """Raises where replicas return floats of TensorFlow, and Keras does not run on it.

    `tf.nn.compute_average_loss` takes a tensor of Torch, returns a loss without
    gradients, and divides by the batch of one replica.
    """
    if "tensorflow" not in sys.modules or backend_name() == "tensorflow":
        return
    for leaf in flatten(list(results)):
        is_tensorflow = type(leaf).__module__.startswith("tensorflow.")
        dtype = getattr(leaf, "dtype", None)
        if is_tensorflow and getattr(dtype, "is_floating", False):
            raise ContextError(
                "The function of `run` returned a TensorFlow tensor, which has "
                "neither gradients nor this strategy's number of replicas. "
                + _REPLACEMENTS.format(backend=backend_name())
            )


@contextlib.contextmanager
def replacements_named() -> Iterator[None]:
    """Adds replacements to errors of TensorFlow's functions."""
    try:
        yield
    except Exception as error:
        if backend_name() != "tensorflow":
            _add_note(error)
        raise


def _add_note(error: Exception) -> None:
    if isinstance(error, AttributeError) and error.name == "numpy":
        error.add_note(_NUMPY)
        return
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    if any("/tensorflow/python/" in name.replace("\\", "/") for name in files):
        error.add_note(_REPLACEMENTS.format(backend=backend_name()))
