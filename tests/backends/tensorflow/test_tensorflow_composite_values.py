"""TensorFlow: per-replica values in `tf.nest`, `tf.function`, loops and conditions."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import keras_strategies as ks


def by_replica(dtype="float32"):
    context = ks.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, dtype) + 1


def numbers(value):
    return [part.numpy().tolist() for part in value.values]


def test_a_program_takes_and_returns_values(mirrored):
    @tf.function
    def doubled(values, factor=2):
        assert isinstance(values["x"], ks.PerReplica)
        return mirrored.run(lambda x: x * factor, (values["x"],)), values

    for _ in range(2):
        x = mirrored.run(by_replica)
        found, same = doubled({"x": x})
        assert isinstance(found, ks.PerReplica)
        assert numbers(found) == [2.0, 4.0]
        assert numbers(same["x"]) == [1.0, 2.0]
    assert doubled.experimental_get_tracing_count() == 1  # There: 1.
    doubled({"x": mirrored.run(lambda: by_replica("int32"))})
    assert doubled.experimental_get_tracing_count() == 2  # There: 2.


def test_a_specification_is_an_input_signature(mirrored):
    rows = tf.data.Dataset.from_tensor_slices((np.arange(6.0), np.arange(6))).batch(4)
    dataset = mirrored.experimental_distribute_dataset(rows)

    @tf.function(input_signature=[dataset.element_spec])
    def step(batch):
        return mirrored.reduce("SUM", mirrored.run(lambda x, _: x, batch), axis=0)

    assert [float(step(batch)) for batch in dataset] == [6.0, 9.0]  # There: 6, 9.
    assert step.experimental_get_tracing_count() == 1


def test_loops_and_conditions_of_a_program(mirrored):
    @tf.function
    def powers(x, count):
        for _ in tf.range(count):
            x = mirrored.run(lambda own: own * 2, (x,))
        if count > 2:
            x = mirrored.run(lambda own: -own, (x,))
        return x

    assert numbers(powers(mirrored.run(by_replica), 3)) == [-8.0, -16.0]
    assert numbers(powers(mirrored.run(by_replica), tf.constant(1))) == [2.0, 4.0]

    @tf.function
    def by_while(x):
        return tf.while_loop(
            lambda i, x: i < 3,
            lambda i, x: (i + 1, mirrored.run(lambda own: own + 1, (x,))),
            (0, x),
        )[1]

    assert numbers(by_while(mirrored.run(by_replica))) == [4.0, 5.0]
