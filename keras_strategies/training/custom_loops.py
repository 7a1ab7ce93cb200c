"""Custom loops on every backend: gradients and compiled steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from keras_strategies.communication.communicator import is_fixed, loop_of
from keras_strategies.communication.joined_workers import joined_workers
from keras_strategies.engines import get_engine
from keras_strategies.errors import InvalidArgumentError
from keras_strategies.keras_compat.variables.materialized import materialized
from keras_strategies.runtime.compiled_functions import register_compiled
from keras_strategies.runtime.replicas.averaged_losses import (
    note_gradients,
    noting_averages,
)
from keras_strategies.runtime.replicas.returned_values import check_returns
from keras_strategies.training.model_hooks import install_hooks


def value_and_grad(
    fn: Callable[..., Any], variables: Sequence[Any], has_aux: bool = False
) -> Callable[..., Any]:
    """Makes a function that returns a loss and its gradients, on every backend.

    Args:
        fn: callable that returns a scalar loss, or with `has_aux` a tuple of the
            loss and anything else. It may call models, update metrics and assign
            variables.
        variables: sequence of `keras.Variable`, what to differentiate by.
        has_aux: bool, whether `fn` returns more than the loss.

    Returns:
        A callable of `fn`'s arguments that returns `(loss, gradients)`, or
        `((loss, aux), gradients)`; gradients are a list in the order of the
        variables, None for one that is frozen or that the loss does not depend on.

    Raises:
        ValueError: without variables, as of a model that is not built.

    Example:

    >>> def loss_fn(x, y):
    ...     return keras.ops.mean((model(x, training=True) - y) ** 2)
    >>> loss, gradients = ks.value_and_grad(loss_fn, model.trainable_variables)(x, y)
    >>> optimizer.apply(gradients, model.trainable_variables)
    """
    variables = list(variables)
    if not variables:
        # The model's first call builds it: its first step would train nothing.
        raise InvalidArgumentError(
            "`value_and_grad` received no variables. An unbuilt model has none: "
            "give it a `keras.Input`, or call `model.build(input_shape)` before the "
            "first step."
        )
    install_hooks()
    noting = noting_averages(fn, has_aux)
    differentiated = get_engine().value_and_grad(noting, variables, has_aux)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        # Outside of a program, variables on parameter servers are read for the call.
        with materialized(variables):
            found = differentiated(*args, **kwargs)
        note_gradients(found[1], fn)
        return found

    return wrapped


def function(
    fn: Callable[..., Any] | None = None, *, jit_compile: bool | None = None
) -> Callable[..., Any]:
    """Compiles a step by the backend's compiler; usable as a decorator.

    On TensorFlow it is `tf.function`; on JAX `jax.jit`, with all Keras state that the
    function reads and assigns passed in and out; on Torch the function runs eagerly
    unless `jit_compile=True`, for `torch.compile`.

    Args:
        fn: callable; a step that calls `strategy.run`, models, optimizers and
            metrics.
        jit_compile: bool or None, whether to compile with XLA (TensorFlow) or
            `torch.compile` (Torch, where it compiles what is around `run`: replicas
            that are threads run eagerly); None for the backend's own choice. JAX
            always compiles, except with False.

    Returns:
        A callable with `fn`'s signature, compiled once for each combination of
        arguments' structure, shapes and dtypes.

    Example:

    >>> @ks.function
    ... def train_step(batch):
    ...     losses = strategy.run(replica_step, args=(batch,))
    ...     return strategy.reduce("SUM", losses)
    """
    if fn is None:
        return lambda fn: function(fn, jit_compile=jit_compile)
    check_returns(fn, "ks.function")
    install_hooks()
    engine = get_engine()
    make = functools.partial(engine.function, fn, jit_compile=jit_compile)
    compiled = make()
    # With fixed workers, a `tf.function` is returned unwrapped.
    if engine.name != "tensorflow" or not is_fixed(joined_workers()):
        compiled = _recompiled(fn, compiled, make)
    # Workers of parameter servers compile the Python function themselves.
    register_compiled(compiled, fn)
    return compiled


def _recompiled(
    fn: Callable[..., Any], compiled: Any, make: Callable[[], Any]
) -> Callable[..., Any]:
    """A compiled function that is compiled again when workers have changed."""
    generation: object = None

    @functools.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled, generation
        loop = loop_of(joined_workers())
        if generation is not loop.generation:
            compiled = compiled if generation is None else make()
            generation = loop.generation
        return loop.call(fn, lambda: compiled(*args, **kwargs), exchanges=False)

    return step
