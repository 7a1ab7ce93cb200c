"""Steps of one's own, written once: gradients on JAX, Torch and TensorFlow.

`StepModel.step(data)` is stateful Keras code. On JAX it is traced in a scope without
state, as Keras's guide on custom steps for JAX does by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

BACKEND = keras.backend.backend()


class StepModel(keras.Model):
    """A model with a `step(data)` that updates variables and returns its logs.

    By default it minimizes `objective(data)`.

    Args:
        other_optimizers: optimizers next to the one that `compile` gets. Their
            variables are state of the model, which JAX needs to see.
        **parts: layers, models and seeds that become attributes.
    """

    def __init__(self, other_optimizers: tuple[Any, ...] = (), **parts: Any) -> None:
        super().__init__()
        self.other_optimizers = other_optimizers
        for name, part in parts.items():
            setattr(self, name, part)

    def step(self, data: Any) -> dict[str, Any]:
        return self.minimized(lambda: self.objective(data))

    def minimized(self, loss_fn: Callable[[], Any]) -> dict[str, Any]:
        return {"objective": self.minimize(loss_fn, self.trainable_variables)}

    @property
    def variables(self) -> list[Any]:
        own = super().variables
        return own + [v for o in self.other_optimizers for v in o.variables]

    def minimize(
        self, loss_fn: Callable[[], Any], variables: list[Any], optimizer: Any = None
    ) -> Any:
        """One step of an optimizer; returns the loss before it."""
        loss, gradients = value_and_gradients(loss_fn, variables)
        self.apply(gradients, variables, optimizer)
        return loss

    def apply(self, gradients: Any, variables: Any, optimizer: Any = None) -> None:
        with without_gradients():
            (optimizer or self.optimizer).apply(gradients, variables)


if BACKEND == "torch":
    import torch

    without_gradients = torch.no_grad

    def value_and_gradients(loss_fn, variables):
        loss = loss_fn()
        values = [v.value for v in variables]
        found = torch.autograd.grad(loss, values, allow_unused=True)
        return loss.detach(), list(found)

    def input_gradients(fn, inputs):
        """Gradients of the sum of `fn(inputs)`, which have gradients themselves."""
        inputs = inputs.detach().requires_grad_(True)
        return torch.autograd.grad(fn(inputs).sum(), inputs, create_graph=True)[0]

    def train_step(self, data):
        return {k: ops.stop_gradient(v) for k, v in self.step(data).items()}

elif BACKEND == "tensorflow":
    import tensorflow as tf

    without_gradients = contextlib.nullcontext

    def value_and_gradients(loss_fn, variables):
        with tf.GradientTape() as tape:
            loss = loss_fn()
        return loss, tape.gradient(loss, [v.value for v in variables])

    def input_gradients(fn, inputs):
        """Gradients of the sum of `fn(inputs)`, which have gradients themselves."""
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            outputs = fn(inputs)
        return tape.gradient(outputs, inputs)

    def train_step(self, data):
        return self.step(data)

else:
    import jax

    without_gradients = contextlib.nullcontext
    # The variables and the scope of the step that is traced.
    _traced: list[tuple[list[Any], keras.StatelessScope]] = []

    def value_and_gradients(loss_fn, variables):
        known, outer = _traced[-1]
        current = [outer.get_current_value(v) for v in known]
        chosen = {id(v): i for i, v in enumerate(variables)}

        def of(values):
            mapping = [
                (v, values[chosen[id(v)]] if id(v) in chosen else value)
                for v, value in zip(known, current, strict=True)
            ]
            with keras.StatelessScope(state_mapping=mapping) as inner:
                loss = loss_fn()
            rest = [v for v in known if id(v) not in chosen]
            return loss, [inner.get_current_value(v) for v in rest]

        (loss, after), gradients = jax.value_and_grad(of, has_aux=True)(
            [outer.get_current_value(v) for v in variables]
        )
        rest = [v for v in known if id(v) not in chosen]
        for variable, value in zip(rest, after, strict=True):
            variable.assign(value)
        return loss, gradients

    def input_gradients(fn, inputs):
        """Gradients of the sum of `fn(inputs)`, which have gradients themselves."""
        return jax.grad(lambda x: ops.sum(fn(x)))(inputs)

    def train_step(self, state, data):
        groups = (
            self.trainable_variables,
            self.non_trainable_variables,
            self.optimizer.variables,
            self.metrics_variables,
        )
        known = [v for group in groups for v in group]
        values = [value for group in state for value in group]
        mapping = list(zip(known, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            _traced.append((known, scope))
            try:
                logs = self.step(data)
            finally:
                _traced.pop()
        after = tuple([scope.get_current_value(v) for v in group] for group in groups)
        return logs, after


StepModel.train_step = train_step
