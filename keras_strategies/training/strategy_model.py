"""Models of a strategy: a subclass of their class, with methods of the strategy."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies.keras_compat.hooks import MethodRestart
from keras_strategies.keras_compat.models.building import base_trainer
from keras_strategies.keras_compat.models.running_methods import running_methods
from keras_strategies.keras_compat.models.strategy_trainer import (
    TrainerOfStrategy,
    is_trainer,
)
from keras_strategies.keras_compat.optimizers.optimizer_classes import (
    portable_optimizer,
)
from keras_strategies.keras_compat.saving.overwriting import may_replace
from keras_strategies.keras_compat.saving.state_trees import tree_of_model
from keras_strategies.keras_compat.saving.streaming import streamed_files
from keras_strategies.keras_compat.strategy_attribute import STRATEGY_ATTRIBUTE
from keras_strategies.training import model_methods
from keras_strategies.training.raw_loops import warn_of_raw_call


def set_model_strategy(model: Any, strategy: Any) -> None:
    """Records the strategy of a model, or of a layer with Keras's `fit`.

    Its class becomes a subclass, so that models without a strategy have Keras's
    methods.
    """
    # object.__setattr__: neither Keras nor TensorFlow may track a strategy.
    object.__setattr__(model, STRATEGY_ATTRIBUTE, strategy)
    if is_trainer(model) and not isinstance(model, StrategyTrainer):
        # `__class__` of an object of the subclass is the class of the user.
        object.__setattr__(model, "__class__", _subclass(type(model)))


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
    if hasattr(kind, "save_lora_weights"):
        names["save_lora_weights"] = _save_lora_weights
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
        is_long = name in ("fit", "evaluate", "predict")
        with running_methods.one(is_long), model_methods.method(self, name):
            changed = model_methods.arguments(self, name, bound.arguments)
            bound.arguments.update(changed)
            return model_methods.call(self, name, original, bound)

    return method


def _write(model: Any, name: str, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes a file with a method of Keras, in the process that saves."""
    if not model_methods.saves(model, filepath):
        return None
    overwrites = args[0] if args else kwargs.get("overwrite", True)
    with (
        model_methods.writing(model, filepath) as path,
        portable_optimizer(model),
        streamed_files(),
    ):
        if not overwrites and not may_replace(filepath):
            return None
        return getattr(super(StrategyModel, model), name)(path, *args, **kwargs)


def _save_lora_weights(self: Any, filepath: Any) -> None:
    """`save_lora_weights` of keras_hub, in the process that saves."""
    if not model_methods.saves(self, filepath):
        return
    # The method is that of a class before `StrategyModel` among the bases.
    original = self.__class__.save_lora_weights
    with model_methods.writing(self, filepath) as path:
        original(self, path)


class StrategyTrainer(TrainerOfStrategy):
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
        outputs = super().__call__(*args, **kwargs)
        if not running_methods.any:
            warn_of_raw_call(self, args, kwargs, outputs)
        return outputs

    def stateless_call(
        self,
        trainable_variables: Any,
        non_trainable_variables: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        outputs = super().stateless_call(
            trainable_variables, non_trainable_variables, *args, **kwargs
        )
        if not running_methods.any:
            warn_of_raw_call(self, args, kwargs, outputs)
        return outputs

    def make_train_function(self, force: bool = False) -> None:
        make = super().make_train_function
        model_methods.step_function(self, "train", make, force)

    def make_test_function(self, force: bool = False) -> None:
        make = super().make_test_function
        model_methods.step_function(self, "test", make, force)

    def make_predict_function(self, force: bool = False) -> None:
        make = super().make_predict_function
        model_methods.step_function(self, "predict", make, force)

    def get_metrics_result(self) -> Any:
        model_methods.reads_results(self)
        # Keras 3.16 on Torch sums metrics over processes, which have the same here.
        return base_trainer().get_metrics_result(self)


class StrategyModel(StrategyTrainer, keras.Model):
    """A model of a strategy. It stands before `keras.Model` among the bases."""

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        # Adds variables to layers.
        with model_methods.method(self, "quantize"):
            super().quantize(*args, **kwargs)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        return _write(self, "save", filepath, *args, **kwargs)

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        return _write(self, "save_weights", filepath, *args, **kwargs)

    def export(self, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        with model_methods.exporting(self):
            return _write(self, "export", filepath, *args, **kwargs)

    def __reduce__(self) -> Any:
        # The original is a method of the subclass, which pickle does not find.
        unpickle, arguments = super().__reduce__()
        return getattr(self.__class__, unpickle.__name__), arguments

    def set_state_tree(self, state_tree: Any) -> Any:
        return super().set_state_tree(tree_of_model(self, state_tree))
