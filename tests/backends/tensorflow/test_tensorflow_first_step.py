"""Options of TensorFlow that shorten the first step of a program."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks

if keras.backend.backend() != "tensorflow":
    pytest.skip("tests of the TensorFlow backend", allow_module_level=True)

import tensorflow as tf
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from keras_strategies.engines.tensorflow.compat.programs import program_options

ks.set_virtual_cpu_devices(4)


def current_options():
    serialized = program_options().config_proto_serialized
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    return config.graph_options.rewrite_options


class Observed(keras.Sequential):
    """Records the state of the process while its step is traced."""

    def predict_step(self, data):
        self.iterations = current_options().meta_optimizer_iterations
        return super().predict_step(data)


def test_a_program_is_optimized_once():
    with ks.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = Observed([keras.Input((2,)), layers.Dense(1)])
    model.predict_on_batch(np.zeros((4, 2), "float32"))
    assert model.iterations == RewriterConfig.ONE
    assert current_options().meta_optimizer_iterations != RewriterConfig.ONE
