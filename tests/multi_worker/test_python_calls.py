"""Torch: how many Python functions a step of a worker calls, more than plain Keras's.

On a GPU the host launches kernels while others run, so that a step takes as long as its
Python where its kernels are short. Times depend on the machine; counts do not.
"""

from __future__ import annotations

import functools
import gc
import sys
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("on JAX and TensorFlow a step is a program", allow_module_level=True)

from multi_worker.clusters import on_clusters, scope_of

WIDTH, BATCH, STEPS = 4, 8, 24
#: More calls than plain Keras: of a step, and for each variable of the model. One for
#: each is that replicas note the functions of Keras that they call.
PER_STEP, PER_VARIABLE = 1500, 28


class CountsCalls(keras.callbacks.Callback):
    """Counts the calls of Python functions in the steps after the first ones.

    The least of them: beats of the lead, and what follows them, come at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.steps: list[int] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.count = 0
        gc.disable()
        sys.setprofile(self._seen)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        sys.setprofile(None)
        gc.enable()
        self.steps.append(self.count)

    def _seen(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event == "call"


def calls_of_a_step(strategy: Any, depth: int) -> int:
    """The calls in a step of a model with so many layers, of two variables each."""
    x = np.ones((BATCH * STEPS, WIDTH), "float32")
    with scope_of(strategy):
        model = keras.Sequential([keras.Input((WIDTH,))])
        for _ in range(depth):
            model.add(keras.layers.Dense(WIDTH))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        counter = CountsCalls()
        # What other tests have left may be collected in a step, with its finalizers.
        gc.collect()
        try:
            model.fit(x, x, batch_size=BATCH, verbose=0, callbacks=[counter])
        finally:
            # Other tests follow in this process.
            sys.setprofile(None)
            gc.enable()
    return min(counter.steps[3:])


@functools.cache
def calls_of_keras(depth: int) -> int:
    return calls_of_a_step(None, depth)


@pytest.mark.nightly(unless=["two"])
@on_clusters("two", "four")
def test_a_step_calls_few_functions_more_than_plain_keras(cluster: Any) -> None:
    few, many = 4, 16
    variables = 2 * (many - few)
    counts = cluster(calls_of_a_step, few), cluster(calls_of_a_step, many)
    for index, (shallow, deep) in enumerate(zip(*counts, strict=True)):
        shallow -= calls_of_keras(few)
        deep -= calls_of_keras(many)
        of_variable = (deep - shallow) / variables
        of_step = shallow - 2 * few * of_variable
        found = index, of_step, of_variable
        assert of_step < PER_STEP, found
        assert of_variable < PER_VARIABLE, found
