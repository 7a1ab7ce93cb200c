"""A parameter-server worker with an accelerator that any machine has.

On JAX and TensorFlow it is the second CPU device, on Torch a device in Python. What a
step computes has to be there; otherwise the step raises, and the test that has
scheduled it fails.
"""

from __future__ import annotations

from typing import Any

import keras

import keras_strategies as ks
from keras_strategies.devices import Device
from keras_strategies.engines import get_engine
from keras_strategies.parameter_server.worker import worker_process

IS_TORCH = keras.backend.backend() == "torch"
ACCELERATOR = Device("simulated", 0) if IS_TORCH else Device("cpu", 1)


def run_worker(**arguments: Any) -> None:
    """Stands in for `worker_process.run_worker`."""
    ks.set_virtual_cpu_devices(2)
    engine: Any = get_engine()
    engine.local_devices = lambda: (ACCELERATOR, Device("cpu", 0))
    globals()[f"_check_{keras.backend.backend()}"]()
    worker_process.run_worker(**arguments)


def _check(tensor: Any) -> None:
    found = get_engine().device_of(tensor)
    assert found == ACCELERATOR, f"{tensor} is on {found}"


def _check_arguments(module: Any, function: str, kind: type) -> None:
    """Checks the tensors that a function of a module is called with."""
    original = getattr(module, function)

    def checked(value: Any) -> Any:
        if isinstance(value, kind):
            _check(value)
        return original(value)

    setattr(module, function, checked)


def _check_jax() -> None:
    import jax

    from keras_strategies.parameter_server.engines import jax_engine

    _check_arguments(jax_engine, "_array", jax.Array)


def _check_tensorflow() -> None:
    import tensorflow as tf

    from keras_strategies.parameter_server.engines import tensorflow_engine

    _check_arguments(tensorflow_engine, "_numpy", tf.Tensor)


def _check_torch() -> None:
    import torch
    from harness import python_accelerator

    from keras_strategies.parameter_server.engines import torch_steps
    from keras_strategies.parameter_server.engines.torch_graphs import GraphRecorder

    python_accelerator.install()
    _check_arguments(torch_steps, "as_array", torch.Tensor)
    graph = GraphRecorder.graph

    def checked_graph(self: Any, inputs: Any) -> Any:
        for tensor in inputs:
            _check(tensor)
        return graph(self, inputs)

    GraphRecorder.graph = checked_graph
