"""JAX: the rows that `predict` returns stay on their devices until they are joined."""

from __future__ import annotations

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX backend", allow_module_level=True)


def predictions(strategy):
    from unittest import mock

    from keras_strategies.engines.jax.fit.compiled_steps import CompiledStep
    from keras_strategies.engines.jax.fit.hlo_collectives import sent_bytes

    jitted, sent = CompiledStep._jitted, []

    def recording(self, state, step):
        program = jitted(self, state, step)

        def run(*arguments):
            executable = program.lower(*arguments).compile()
            sent.append(sent_bytes(executable.as_text()))
            return executable(*arguments)

        return run

    x = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")
    found = []
    with mock.patch.object(CompiledStep, "_jitted", recording):
        for several in (1, 2):
            keras.utils.set_random_seed(1)
            with strategy.scope():
                model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
                model.compile("sgd", "mse", steps_per_execution=several)
            found.append(model.predict(x, batch_size=5, verbose=0))
    kernel, bias = model.get_weights()
    return sent, found, x @ kernel + bias


@pytest.mark.parametrize("cluster", ["two_by_two"], indirect=True, scope="session")
def test_no_device_gets_the_rows_of_others_in_the_program(cluster):
    for sent, found, expected in cluster(predictions):
        assert len(sent) >= 3
        assert not any(sent), sent
        for each in found:
            np.testing.assert_allclose(each, expected, atol=1e-5)
