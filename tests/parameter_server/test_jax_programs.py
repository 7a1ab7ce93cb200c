"""JAX: programs of steps, chosen by what `jax.jit` sees of their arguments."""

from __future__ import annotations

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX backend", allow_module_level=True)

import jax

from keras_strategies.parameter_server.engines.engine_interface import StepVariables
from keras_strategies.parameter_server.engines.jax_engine import (
    JaxParameterServerEngine,
)

DTYPES = ("int32", "int64", "uint32", "uint64", "float32", "float64", "int32")


def doubled_program():
    """A program of which each trace returns its own text, and the number of traces."""
    traced = []

    def body(batch):
        traced.append(str(batch.dtype))
        return {"dtype": traced[-1], "value": batch * 2}

    program = JaxParameterServerEngine().program(body, StepVariables([], []), False)
    return program, traced


@pytest.mark.parametrize("x64", [False, True])
def test_batches_of_dtypes_that_jax_converts_alike(x64) -> None:
    program, traced = doubled_program()
    with jax.enable_x64(x64):
        for dtype in DTYPES:
            found = program.run(np.ones((3,), dtype), [], []).outputs
            seen = str(jax.dtypes.canonicalize_dtype(dtype))
            assert found["dtype"] == seen
            assert found["value"].dtype == seen
            np.testing.assert_array_equal(found["value"], [2, 2, 2])
    assert len(traced) == (6 if x64 else 3)
