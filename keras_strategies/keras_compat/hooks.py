"""Replacements of Keras's functions, and the hooks that they call."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.optimizers.applying import applying
from keras_strategies.keras_compat.saving.streaming import streamed_files
from keras_strategies.keras_compat.saving.weights_files import damage_named
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.keras_compat.thread_state import (
    current_stateless_scope,
    restore_scope_state,
)
from keras_strategies.keras_compat.variables.loaded_variables import (
    load_presets_into_variables,
    values_of_files,
)


class MethodRestart(BaseException):
    """Unwinds a method of a model, which is then called again with the same arguments.

    Args:
        name: str, the method, such as `"fit"`; methods that it called are unwound too.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.name = name


class ModelHooks(Protocol):
    """Functions that the patches of Keras call."""

    def after_init(self, made: Any) -> None:
        """A model (its `__init__` has begun) or a variable has been made."""

    def before_init(self, variable: Any) -> None:
        """`Variable.__init__` begins."""

    def init_context(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around `Variable.__init__`."""

    def initial_value(self, value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
        """Replaces the arguments of `Variable.__init__` for a variable with a value."""

    def check_strategy(self, model: Any, name: str) -> None:
        """Checks a model without a strategy, of which a method is called in a scope."""

    def input(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Changes of the arguments, by name, of a data adapter."""

    def input_made(self, epochs: Any) -> None:
        """`fit`, `evaluate` or `predict` has made an epoch iterator of its input."""

    def building(self, model: Any, batch: Any) -> None:
        """Called before a model is built from the shapes of its first batch."""

    def has_state(self, model: Any) -> bool:
        """Whether the steps of a model take and return its variables, on JAX."""

    def optimizer_apply(
        self, optimizer: Any, original: Callable[..., Any], grads: Any, variables: Any
    ) -> Any:
        """Instead of `optimizer.apply(grads, variables)`."""

    def initialized(self, variable: Any) -> None:
        """A variable of a strategy has its first value; may be called again."""

    def array_to_assign(self, variable: Any, value: Any) -> Any:
        """What `variable.assign` gets in place of a NumPy array; None if it is done."""

    def variable_assigned(self, variable: Any) -> None:
        """After `variable.assign(value)`, outside of every stateless scope."""

    def variable_added(
        self, variable: Any, original: Callable[..., Any], delta: Any
    ) -> Any:
        """Instead of `variable.assign_add(delta)`."""

    def representation(self, variable: Any, text: str) -> str:
        """Instead of `repr(variable)`, which would be `text`."""

    def shows_warnings(self) -> bool:
        """Whether warnings of Keras about a layer call are shown in this thread."""
        ...

    def moments(
        self, layer: Any, original: Callable[..., Any], inputs: Any, mask: Any
    ) -> Any:
        """Instead of `BatchNormalization._moments(inputs, mask)`."""

    def loss(
        self,
        loss: Any,
        original: Callable[..., Any],
        y_true: Any,
        y_pred: Any,
        weights: Any,
    ) -> Any:
        """Instead of `loss(y_true, y_pred, weights)`."""

    def metrics_updated(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around the updates of all metrics of `compile`."""

    def metric_update(
        self,
        original: Callable[..., Any],
        metric: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        is_of_keras: bool,
    ) -> Any:
        """Instead of `metric.update_state(*args, **kwargs)`.

        `original` gets the metric and these; `is_of_keras` says whether its code is one
        of Keras's.
        """

    def mask_weights(
        self,
        original: Callable[..., Any],
        weights: Any,
        mask: Any,
        dtype: Any,
        reduction: Any,
    ) -> Any:
        """The weights of a loss, those of the mask among them."""

    def reduced_values(
        self, original: Callable[..., Any], values: Any, weights: Any, reduction: Any
    ) -> Any:
        """A loss from its values, which have been multiplied by the weights."""


_hooks: ModelHooks | None = None


def install(hooks: ModelHooks) -> None:
    """Hooks Keras, once; later calls do nothing.

    Raises:
        BackendError: for a version of Keras that is not supported.
    """
    patching.supported_version()
    if not patching.is_installed("strategies"):
        global _hooks
        _hooks = hooks
        patching.install("strategies")
    load_presets_into_variables()


def installed_hooks() -> ModelHooks:
    """The hooks of `install`."""
    assert _hooks is not None
    return _hooks


def trainer_init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    # `Model.__init__` calls it first.
    restore_scope_state()
    original(self, *args, **kwargs)
    installed_hooks().after_init(self)


def variable_init(
    original: Any,
    self: Any,
    initializer: Any,
    shape: Any = None,
    dtype: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    hooks = installed_hooks()
    restore_scope_state()
    hooks.before_init(self)
    with hooks.init_context():
        if not callable(initializer) and not isinstance(initializer, str):
            initializer, shape, dtype = hooks.initial_value(initializer, shape, dtype)
        original(self, initializer, shape, dtype, *args, **kwargs)
    hooks.after_init(self)


def assign_add(original: Any, self: Any, value: Any) -> Any:
    if current_stateless_scope() is None:
        return original(self, value)
    own = functools.partial(original, self)
    return installed_hooks().variable_added(self, own, value)


def assign_sub(original: Any, self: Any, value: Any) -> Any:
    if current_stateless_scope() is None:
        return original(self, value)
    return installed_hooks().variable_added(
        self, lambda negative: original(self, value), -value
    )


def apply(original: Any, self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    if applying.sink is not None:
        return applying.sink(self, grads, trainable_variables)
    if current_stateless_scope() is None:
        return original(self, grads, trainable_variables)
    own = functools.partial(original, self)
    return installed_hooks().optimizer_apply(self, own, grads, trainable_variables)


def input_structure_warning(
    original: Any, self: Any, inputs: Any, raise_exception: bool = False
) -> None:
    if raise_exception or installed_hooks().shows_warnings():
        original(self, inputs, raise_exception)


def moments(original: Any, self: Any, inputs: Any, mask: Any) -> Any:
    own = functools.partial(original, self)
    return installed_hooks().moments(self, own, inputs, mask)


def loss_call(
    original: Any, self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    return installed_hooks().loss(self, original, y_true, y_pred, sample_weight)


def metric_update(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return installed_hooks().metric_update(original, self, args, kwargs, True)


def compiled_metrics(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    with installed_hooks().metrics_updated():
        original(self, *args, **kwargs)


def metrics_update(
    original: Any, self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> None:
    for metric in self.metrics:
        arguments = y_true, y_pred
        weights = {"sample_weight": sample_weight}
        update = type(metric).update_state
        if update.__module__.startswith("keras.src."):
            metric.update_state(*arguments, **weights)
        else:
            installed_hooks().metric_update(update, metric, arguments, weights, False)


def apply_mask(
    original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: Any
) -> Any:
    hooks = installed_hooks()
    return hooks.mask_weights(original, sample_weight, mask, dtype, reduction)


def reduce_values(
    original: Any,
    values: Any,
    sample_weight: Any = None,
    reduction: Any = "sum_over_batch_size",
) -> Any:
    return installed_hooks().reduced_values(original, values, sample_weight, reduction)


@functools.cache
def _signature(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method)


def epochs(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    bound = _signature(original).bind(self, *args, **kwargs)
    bound.arguments.update(installed_hooks().input(bound.arguments))
    original(*bound.args, **bound.kwargs)
    installed_hooks().input_made(self)


def load_model(original: Any, fileobj: Any, *args: Any, **kwargs: Any) -> Any:
    with streamed_files(), values_of_files():
        return original(fileobj, *args, **kwargs)


def load_weights(
    original: Any, model: Any, filepath: Any, *args: Any, **kwargs: Any
) -> None:
    is_own = strategy_of(model) is not None
    with contextlib.ExitStack() as stack:
        if is_own:
            stack.enter_context(damage_named(filepath))
            stack.enter_context(streamed_files())
        original(model, filepath, *args, **kwargs)


#: Methods, by the function that makes their steps.
_STEPS_OF = {
    "make_train_function": "fit` or `train_on_batch",
    "make_test_function": "evaluate` or `test_on_batch",
    "make_predict_function": "predict` or `predict_on_batch",
}


def check_model_scope(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    name = original.__name__
    installed_hooks().check_strategy(self, _STEPS_OF.get(name, name))
    return original(self, *args, **kwargs)
