"""Where Keras asks the strategy: what is called at each hooked place."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

from keras_strategies.keras_compat.layers import thread_route
from keras_strategies.keras_compat.models import (
    first_batch,
    is_unbuilt,
    portable_optimizer,
)
from keras_strategies.keras_compat.parameter_server import applying
from keras_strategies.keras_compat.patching import base_trainer, installed, replace
from keras_strategies.keras_compat.state import current_stateless_scope
from keras_strategies.keras_compat.state_trees import hook_state_trees

_METHODS = (
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)


_STEPS = {"train": "train_step", "test": "test_step", "predict": "predict_step"}


class ModelHooks(Protocol):
    """What is called at the hooked places."""

    def created(self, made: Any) -> None:
        """A model (its `__init__` has begun) or a variable has been made."""

    def making(self, variable: Any) -> None:
        """`Variable.__init__` begins."""

    def creating(self) -> contextlib.AbstractContextManager[Any]:
        """Entered around `Variable.__init__`."""

    def initial_value(self, value: Any, shape: Any, dtype: Any) -> tuple[Any, Any, Any]:
        """The first three arguments of `Variable.__init__`, of which one is a value."""

    def method(self, model: Any, name: str) -> contextlib.AbstractContextManager[Any]:
        """Entered around `fit`, `evaluate`, ... and `compile`."""

    def arguments(
        self, model: Any, name: str, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Inside of `method`: the arguments by name, to call the original with."""

    def call(self, model: Any, name: str, original: Any, bound: Any) -> Any:
        """Inside of `method`, instead of `original(*bound.args, **bound.kwargs)`."""

    def input_made(self, adapter: Any) -> None:
        """`fit` or one of its siblings has made a data adapter of its input."""

    def building(self, model: Any, batch: Any) -> None:
        """A model is to be built from the shapes of its first batch."""

    def step_function(
        self, model: Any, kind: str, make: Callable[[bool], Any], force: bool
    ) -> Any:
        """Instead of `make_{kind}_function(force)`, with `make` the original."""

    def optimizer_apply(
        self, optimizer: Any, original: Callable[..., Any], grads: Any, variables: Any
    ) -> Any:
        """Instead of `optimizer.apply(grads, variables)`."""

    def variable_assigned(self, variable: Any, value: Any) -> None:
        """After `variable.assign(value)`, outside of every stateless scope."""

    def variable_added(
        self, variable: Any, original: Callable[..., Any], delta: Any
    ) -> Any:
        """Instead of `variable.assign_add(delta)`."""

    def writing(self, model: Any, path: Any) -> contextlib.AbstractContextManager[Any]:
        """Entered around the writing of a file, to the path that it gives."""

    def exporting(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Entered around `model.export`."""

    def loaded(self, model: Any, source: Any) -> None:
        """A model has its weights from a path, or from an open `.keras` file."""

    def saves(self, model: Any) -> bool:
        """Whether this process writes the files of a model that is saved."""

    def representation(self, variable: Any, text: str) -> str:
        """Instead of `repr(variable)`, which would be `text`."""

    def moments(
        self, layer: Any, original: Callable[..., Any], inputs: Any, mask: Any
    ) -> Any:
        """Instead of `BatchNormalization._moments(inputs, mask)`."""


def install(hooks: ModelHooks) -> None:
    """Hooks Keras, once; later calls do nothing."""
    if installed:
        return
    # Keras 3.15: keras.src.models.model.Model(Trainer of the backend, base
    # Trainer, Layer); `Model.__init__` calls `Trainer.__init__(self)` first.
    from keras.src.backend.common.variables import Variable as KerasVariable
    from keras.src.layers.layer import Layer
    from keras.src.layers.normalization.batch_normalization import BatchNormalization
    from keras.src.models.model import Model
    from keras.src.models.model import Trainer as BackendTrainer
    from keras.src.optimizers.base_optimizer import BaseOptimizer
    from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
    from keras.src.optimizers.multi_optimizer import MultiOptimizer
    from keras.src.saving import saving_lib
    from keras.src.trainers.epoch_iterator import EpochIterator

    Trainer = base_trainer()

    def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            hooks.created(self)

        return __init__

    def wrap_variable_init(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(
            self: Any,
            initializer: Any,
            shape: Any = None,
            dtype: Any = None,
            *args: Any,
            **kwargs: Any,
        ) -> None:
            hooks.making(self)
            with hooks.creating():
                if not callable(initializer) and not isinstance(initializer, str):
                    initializer, shape, dtype = hooks.initial_value(
                        initializer, shape, dtype
                    )
                original(self, initializer, shape, dtype, *args, **kwargs)
            hooks.created(self)

        return __init__

    def wrap_method(original: Callable[..., Any]) -> Callable[..., Any]:
        name = original.__name__
        signature = inspect.signature(original)

        @functools.wraps(original)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(self, *args, **kwargs)
            except TypeError:
                # The original says what is wrong.
                return original(self, *args, **kwargs)
            with hooks.method(self, name):
                given = hooks.arguments(self, name, bound.arguments)
                bound.arguments.update(given)
                return hooks.call(self, name, original, bound)

        return method

    def wrap_make(kind: str) -> Callable[..., Any]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def make(self: Any, force: bool = False) -> Any:
                return hooks.step_function(
                    self, kind, functools.partial(original, self), force
                )

            return make

        return wrap

    def wrap_call(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
            route = thread_route.call
            if route is None:
                return original(self, *args, **kwargs)
            return route(self, functools.partial(original, self), args, kwargs)

        return __call__

    def wrap_moments(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _moments(self: Any, inputs: Any, mask: Any) -> Any:
            return hooks.moments(self, functools.partial(original, self), inputs, mask)

        return _moments

    def wrap_apply(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            if applying.sink is not None:
                return applying.sink(self, grads, trainable_variables)
            return hooks.optimizer_apply(
                self, functools.partial(original, self), grads, trainable_variables
            )

        return apply

    def wrap_shared_apply(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            # Otherwise it is the optimizers that it calls that matter.
            if applying.sink is not None:
                return applying.sink(self, grads, trainable_variables)
            return original(self, grads, trainable_variables)

        return apply

    def wrap_stateless_apply(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def stateless_apply(
            self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
        ) -> Any:
            # Whoever takes the gradients of `apply` takes them as they are: a
            # LossScaleOptimizer's own applies its inner optimizer in a condition.
            own = original if applying.sink is None else BaseOptimizer.stateless_apply
            return own(self, optimizer_variables, grads, trainable_variables)

        return stateless_apply

    def wrap_assign(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def assign(self: Any, value: Any) -> Any:
            result = original(self, value)
            if current_stateless_scope() is None:
                hooks.variable_assigned(self, result)
            return result

        return assign

    def wrap_assign_add(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def assign_add(self: Any, value: Any) -> Any:
            return hooks.variable_added(self, functools.partial(original, self), value)

        return assign_add

    def wrap_assign_sub(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def assign_sub(self: Any, value: Any) -> Any:
            return hooks.variable_added(
                self, lambda negative: original(self, value), -value
            )

        return assign_sub

    def wrap_repr(original: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(original)
        def __repr__(self: Any) -> str:
            return hooks.representation(self, original(self))

        return __repr__

    def wrap_epochs(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            hooks.input_made(self.data_adapter)

        return __init__

    def wrap_build(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def _symbolic_build(
            self: Any, iterator: Any = None, data_batch: Any = None
        ) -> None:
            if data_batch is None and iterator is not None and is_unbuilt(self):
                data_batch = first_batch(iterator)
            if data_batch is not None:
                hooks.building(self, data_batch)
            original(self, iterator=iterator, data_batch=data_batch)

        return _symbolic_build

    def wrap_save(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
            if not hooks.saves(self):
                return None
            with hooks.writing(self, filepath) as path, portable_optimizer(self):
                return original(self, path, *args, **kwargs)

        return save

    def wrap_export(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def export(self: Any, *args: Any, **kwargs: Any) -> Any:
            with hooks.exporting(self):
                return original(self, *args, **kwargs)

        return export

    def wrap_load_weights(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load_weights(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, filepath, *args, **kwargs)
            hooks.loaded(self, filepath)
            return result

        return load_weights

    def wrap_load_model(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _load_model_from_fileobj(fileobj: Any, *args: Any, **kwargs: Any) -> Any:
            model = original(fileobj, *args, **kwargs)
            hooks.loaded(model, fileobj)
            return model

        return _load_model_from_fileobj

    hook_state_trees()
    replace(saving_lib, "_load_model_from_fileobj", wrap_load_model)
    replace(Model, "load_weights", wrap_load_weights)
    for name in ("save", "save_weights"):
        replace(Model, name, wrap_save)
    replace(Model, "export", lambda original: wrap_export(wrap_save(original)))
    replace(Trainer, "_symbolic_build", wrap_build)
    replace(EpochIterator, "__init__", wrap_epochs)
    replace(BaseOptimizer, "apply", wrap_apply)
    replace(LossScaleOptimizer, "apply", wrap_apply)
    replace(MultiOptimizer, "apply", wrap_shared_apply)
    replace(LossScaleOptimizer, "stateless_apply", wrap_stateless_apply)
    replace(KerasVariable, "assign", wrap_assign)
    replace(KerasVariable, "assign_add", wrap_assign_add)
    replace(KerasVariable, "assign_sub", wrap_assign_sub)
    replace(KerasVariable, "__init__", wrap_variable_init)
    replace(KerasVariable, "__repr__", wrap_repr)
    replace(Trainer, "__init__", wrap_init)
    replace(Trainer, "compile", wrap_method)
    for name in _METHODS:
        replace(BackendTrainer, name, wrap_method)
    for kind in _STEPS:
        replace(BackendTrainer, f"make_{kind}_function", wrap_make(kind))
    replace(Layer, "__call__", wrap_call)
    replace(BatchNormalization, "_moments", wrap_moments)
