"""Outputs that stay on their replicas are tensors of the global batch in a program."""

from __future__ import annotations

from typing import Any

import keras
import pytest

if keras.backend.backend() != "tensorflow":
    pytest.skip("tensors of TensorFlow", allow_module_level=True)

import tensorflow as tf
from row_parts.functions import CLASSES, TARGETS, X, compared, results

import keras_strategies as ks
from keras_strategies.engines.tensorflow.data_parallel.row_parts import (
    TensorFlowRowParts,
)


def _read(use: Any) -> Any:
    """A step that uses outputs; the tensors that it returns are compared."""

    def make() -> Any:
        last = keras.layers.Dense(CLASSES)
        last.build((None, CLASSES))

        def step(model: Any, x: Any, y: Any, weights: Any) -> dict[str, Any]:
            found = use(model, x, y, last)
            return {str(i): each for i, each in enumerate(found)}

        return step

    return make


def joins_of(use: Any, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compares a use of outputs on replicas with one on one device."""
    joined = []
    original = TensorFlowRowParts.joined_silently

    def noted(self: Any) -> Any:
        if self._all_rows is None:
            joined.append(tuple(self.shape))
        return original(self)

    monkeypatch.setattr(TensorFlowRowParts, "joined_silently", noted)
    compared(_read(use), X, TARGETS["real"], batch_size=batch_size)
    return len(joined)


def loss_of(y_true: Any, outputs: Any) -> Any:
    return keras.losses.MeanSquaredError()(y_true, outputs)


def read(model: Any) -> list[Any]:
    return [v.value for v in model.trainable_variables]


def of_traits(model: Any, x: Any, y: Any, last: Any) -> Any:
    outputs = model(x)
    assert isinstance(outputs, tf.Tensor)
    assert tf.is_tensor(outputs) and keras.ops.is_tensor(outputs)
    assert outputs.dtype == tf.float32
    assert outputs.shape[1:] == (5,) and outputs.shape[0] == x.shape[0]
    assert outputs.ndim == len(outputs.shape) == 2
    assert outputs.graph is x.graph
    assert "shape=" in repr(outputs) and "shape=" in str(outputs)
    assert outputs.ref() == outputs.ref()
    outputs.set_shape([None, 5])
    return [loss_of(y, outputs)]


def of_operations(model: Any, x: Any, y: Any, last: Any) -> Any:
    o = model(x)
    as_list = [
        o + 1,
        tf.matmul(o, o, transpose_b=True),
        tf.reshape(o, [-1]),
        tf.reduce_sum(o, 0),
        o[2:3],
        o == o,
        tf.stack([o, o]),
        tf.shape(o),
        tf.convert_to_tensor(o),
        keras.ops.softmax(o, axis=0),
        keras.ops.shape(o)[0],
        keras.losses.mean_squared_error(y, o),
        tf.map_fn(lambda row: row * 2, o),
        o,
    ]
    return [tf.reduce_sum(tf.abs(tf.cast(each, tf.float32))) for each in as_list]


def of_control_flow(model: Any, x: Any, y: Any, last: Any) -> Any:
    """Joined in the step's graph, also if a branch or a loop is the first to ask."""
    o = model(x)
    with tf.GradientTape() as tape:
        looped = model(x)
        branched = model(x)
        _, total = tf.while_loop(
            lambda i, z: i < 3, lambda i, z: (i + 1, z + looped), [0, tf.zeros_like(o)]
        )
        total += tf.cond(
            tf.reduce_sum(x) > 1e9, lambda: branched * 2, lambda: branched * 3
        )
        loss = tf.reduce_mean(total**2)
    in_branch = tf.cond(
        tf.reduce_sum(x) > 1e9, lambda: loss_of(y, o), lambda: 2 * loss_of(y, o)
    )
    in_function = tf.function(lambda z: tf.reduce_sum(z * 2))(model(x))
    return [loss, in_branch, in_function, *tape.gradient(loss, read(model))]


def of_gradients_of_outputs(model: Any, x: Any, y: Any, last: Any) -> Any:
    """The gradient of a loss on parts, by outputs."""
    with tf.GradientTape(persistent=True) as tape:
        o = model(x)
        loss = loss_of(y, o)
        both = loss + tf.reduce_sum(o**3)
    found = [tape.gradient(loss, o), tape.gradient(both, o), *tape.gradient(o, [o])]
    found += tape.gradient(o, read(model)) + tape.gradient(both, read(model))
    given = tape.gradient(o, read(model), output_gradients=tf.cast(y, tf.float32))
    return [tf.convert_to_tensor(each) for each in (*found, *given)]


def of_watched_outputs(model: Any, x: Any, y: Any, last: Any) -> Any:
    o = model(x)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(o)
        loss = loss_of(y, o)
        largest = tf.reduce_max(o)
    return [
        tf.convert_to_tensor(tape.gradient(loss, o)),
        tf.convert_to_tensor(tape.gradient(largest, o)),
    ]


@tf.custom_gradient
def _tripled(value: Any) -> Any:
    return 2 * value, lambda gradient: 3 * gradient


def of_several_paths(model: Any, x: Any, y: Any, last: Any) -> Any:
    """Gradients of parts and of joined rows are added."""
    found = []
    for use in (
        lambda o: loss_of(y, o) + tf.reduce_mean(o**2),
        lambda o: tf.reduce_mean(o**2) + loss_of(y, o),
        lambda o: loss_of(y, _tripled(o)) + loss_of(y, o),
        lambda o: tf.reduce_sum(tf.stop_gradient(o)) * loss_of(y, o),
    ):
        with tf.GradientTape() as tape:
            loss = use(model(x))
        found += [loss, *tape.gradient(loss, read(model))]
    return found


def of_second_order(model: Any, x: Any, y: Any, last: Any) -> Any:
    with tf.GradientTape() as tape:
        with tf.GradientTape() as inner:
            o = model(x)
            loss = loss_of(y, o)
        penalty = tf.reduce_sum(inner.gradient(loss, o) ** 2)
        total = penalty + loss
    return [penalty, *tape.gradient(total, read(model))]


def of_layers(model: Any, x: Any, y: Any, last: Any) -> Any:
    """Another layer call gets the parts."""
    with tf.GradientTape() as tape:
        loss = loss_of(y, last(model(x)))
    return [loss, *tape.gradient(loss, read(model) + read(last))]


USES = {
    of_traits: 0,
    of_operations: 1,
    of_control_flow: 4,
    # The gradient of outputs is one of parts until the step returns it; with the one
    # of joined rows it is added.
    of_gradients_of_outputs: None,
    of_watched_outputs: None,
    of_several_paths: None,
    of_second_order: None,
    of_layers: 0,
}


@pytest.mark.nightly(unless=["of_traits-11"])
@pytest.mark.filterwarnings("ignore:A gradient through layer")
@pytest.mark.parametrize("batch_size", [11, 4])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_uses(use: Any, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    joins = joins_of(use, batch_size, monkeypatch)
    if USES[use] is not None:
        assert joins == USES[use]


def test_targets_of_another_unknown_length_are_an_error() -> None:
    """Where their length is not known in the program, it is checked when it runs."""

    def make() -> Any:
        def step(model: Any, x: Any, y: Any, weights: Any) -> dict[str, Any]:
            return {"loss": loss_of(tf.concat([y, y], 0), model(x))}

        return step

    errors = (tf.errors.InvalidArgumentError, ValueError)
    with pytest.raises(errors, match=r"numbers of rows|must be equal"):
        results(
            ks.MirroredStrategy(["cpu:0", "cpu:1"]),
            make,
            X,
            TARGETS["real"],
            batch_size=4,
        )
