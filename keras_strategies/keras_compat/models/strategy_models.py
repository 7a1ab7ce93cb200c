"""Models of a strategy: a subclass of their class, with methods that call the hooks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.models.model import Trainer

from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.backends.keras_on_jax import record_read_jax_state
from keras_strategies.keras_compat.backends.keras_on_tensorflow import (
    is_trained_on_several_devices,
)
from keras_strategies.keras_compat.hooks import MethodRestart, installed_hooks
from keras_strategies.keras_compat.models.building import (
    base_trainer,
    empty_input,
    is_unbuilt,
)
from keras_strategies.keras_compat.models.first_batches import first_batch
from keras_strategies.keras_compat.models.input_adapters import own_part
from keras_strategies.keras_compat.optimizers.optimizer_classes import (
    portable_optimizer,
)
from keras_strategies.keras_compat.saving.state_trees import tree_of_model
from keras_strategies.keras_compat.saving.streaming import streamed_files
from keras_strategies.keras_compat.strategy_attribute import STRATEGY_ATTRIBUTE
from keras_strategies.keras_compat.variables.strategy_variables import (
    set_variable_strategy,
)


def set_strategy(made: Any, strategy: Any) -> None:
    """Records the strategy of a model or a variable.

    The class of the model or variable becomes a subclass, so that those without a
    strategy have Keras's methods.
    """
    if isinstance(made, keras.Variable):
        set_variable_strategy(made, strategy)
        return
    # object.__setattr__: neither Keras nor TensorFlow may track a strategy.
    object.__setattr__(made, STRATEGY_ATTRIBUTE, strategy)
    if isinstance(made, Trainer) and not isinstance(made, StrategyTrainer):
        # `__class__` of an object of the subclass is the class of the user.
        object.__setattr__(made, "__class__", _subclass(type(made)))


def _subclass(kind: Any) -> Any:
    for found in type.__subclasses__(kind):
        if vars(found).get("_keras_strategies_kind") is kind:
            return found
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_keras_strategies_kind": kind,
        # Keras serializes, clones and names models by it.
        "__class__": property(lambda self: kind),
    }
    own = StrategyModel if issubclass(kind, keras.Model) else StrategyTrainer
    bases = (own,) if kind is keras.Model else (kind, own)
    return types.new_class(kind.__name__, bases, {}, lambda body: body.update(names))


@functools.cache
def _signature(method: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(method)


def _method(name: str) -> Any:
    """`compile`, `fit` or another training method, in the strategy's scope."""

    @functools.wraps(getattr(keras.Model, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return once(self, *args, **kwargs)
            except MethodRestart as again:
                if again.name != name:
                    raise

    def once(self: Any, *args: Any, **kwargs: Any) -> Any:
        original = getattr(super(StrategyTrainer, type(self)), name)
        try:
            bound = _signature(original).bind(self, *args, **kwargs)
        except TypeError:
            return original(self, *args, **kwargs)  # Raises the same error.
        hooks = installed_hooks()
        is_long = name in ("fit", "evaluate", "predict")
        with method_running(is_long), hooks.method(self, name):
            changed = hooks.arguments(self, name, bound.arguments)
            bound.arguments.update(changed)
            return hooks.call(self, name, original, bound)

    return method


class _Running:
    """Number of running methods of models in this process."""

    count = 0
    lock = threading.Lock()


@contextlib.contextmanager
def method_running(is_long: bool) -> Iterator[None]:
    """Counts a method of a model; the end of the last one removes patches of steps."""
    with _Running.lock:
        _Running.count += 1
    try:
        yield
    finally:
        with _Running.lock:
            _Running.count -= 1
            if is_long and not _Running.count:
                patching.remove("routes")
                patching.remove("input")
                patching.remove("replicas")
                patching.remove("row parts")


def _write(model: Any, name: str, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes a file with a method of Keras, in the process that saves."""
    hooks = installed_hooks()
    if not hooks.saves(model, filepath):
        return None
    with (
        hooks.writing(model, filepath) as path,
        portable_optimizer(model),
        streamed_files(),
    ):
        return getattr(super(StrategyModel, model), name)(path, *args, **kwargs)


class StrategyTrainer(Trainer):  # type: ignore[misc]
    """Training of a strategy's model. It stands before Keras's `Trainer` in the bases.

    Also of classes that have Keras's `Trainer` and are layers, but no `keras.Model`.
    """

    compile = _method("compile")
    fit = _method("fit")
    evaluate = _method("evaluate")
    predict = _method("predict")
    train_on_batch = _method("train_on_batch")
    test_on_batch = _method("test_on_batch")
    predict_on_batch = _method("predict_on_batch")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _Running.count:
            installed_hooks().called(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def stateless_call(
        self,
        trainable_variables: Any,
        non_trainable_variables: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not _Running.count:
            installed_hooks().called(self, args, kwargs)
        return super().stateless_call(
            trainable_variables, non_trainable_variables, *args, **kwargs
        )

    def make_train_function(self, force: bool = False) -> Any:
        make = super().make_train_function
        return installed_hooks().step_function(self, "train", make, force)

    def make_test_function(self, force: bool = False) -> Any:
        make = super().make_test_function
        return installed_hooks().step_function(self, "test", make, force)

    def make_predict_function(self, force: bool = False) -> Any:
        make = super().make_predict_function
        return installed_hooks().step_function(self, "predict", make, force)

    def _symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        if data_batch is None and iterator is not None and is_unbuilt(self):
            data_batch = own_part(first_batch(iterator))
            if data_batch is None:
                raise empty_input(self)
        if data_batch is not None:
            installed_hooks().building(self, data_batch)
        super()._symbolic_build(iterator=iterator, data_batch=data_batch)

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        if keras.backend.backend() == "jax":
            # Keras 3.16 reads a batch here that `fit` would not see again.
            self._symbolic_build(iterator=iterator, data_batch=data_batch)
        else:
            super()._maybe_symbolic_build(iterator=iterator, data_batch=data_batch)

    def _get_jax_state(
        self, purge_model_variables: bool = False, **groups: bool
    ) -> tuple[Any, ...]:
        # Keras empties the variables, and records their arrays after the first step: an
        # interrupt between the two would leave a model without weights.
        if not installed_hooks().has_state(self):
            return tuple([] for is_read in groups.values() if is_read)
        state: tuple[Any, ...] = super()._get_jax_state(**groups)
        if purge_model_variables:
            record_read_jax_state(self, groups, state)
            self._purge_model_variables(**groups)
        return state

    def _resolve_auto_jit_compile(self) -> bool:
        # XLA cannot compile a program of TensorFlow's for several devices.
        if is_trained_on_several_devices(self):
            return False
        return bool(super()._resolve_auto_jit_compile())

    def _initialize_ddp(self) -> None:
        """Keras 3.16 on Torch wraps models in `DistributedDataParallel` by it."""

    def get_metrics_result(self) -> Any:
        installed_hooks().reads_results(self)
        # Keras 3.16 on Torch sums metrics over processes, which have the same here.
        return base_trainer().get_metrics_result(self)


class StrategyModel(StrategyTrainer, keras.Model):
    """A model of a strategy. It stands before `keras.Model` among the bases."""

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        # Adds variables to layers.
        with installed_hooks().method(self, "quantize"):
            super().quantize(*args, **kwargs)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        return _write(self, "save", filepath, *args, **kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        return _write(self, "save_weights", filepath, *args, **kwargs)

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        with installed_hooks().exporting(self):
            return _write(self, "export", filepath, *args, **kwargs)

    def __reduce__(self) -> Any:
        # The original is a method of the subclass, which pickle does not find.
        _, arguments = super().__reduce__()
        return self.__class__._unpickle_model, arguments

    def set_state_tree(self, state_tree: Any) -> Any:
        return super().set_state_tree(tree_of_model(self, state_tree))
