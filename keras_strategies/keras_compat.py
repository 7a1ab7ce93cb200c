"""All that this package uses of Keras beyond its public interface.

Tested with Keras 3.15 and 3.16. Each function says which symbol it relies on;
`tests/test_keras_compat.py` fails when one of them moves.

Keras is hooked in these places, all of them installed by the first strategy that
needs them and none by an import:

- `Trainer.__init__`, `Variable.__init__`: models and variables remember the
  strategy that they were made under;
- `fit` and its siblings, `compile`: run in that strategy's scope;
- `make_train_function` and its siblings: the strategy wraps the step;
- `Layer.__call__`: a thread can route the outermost call of a step;
- `BatchNormalization._moments`: statistics over the global batch;
- `EpochIterator.__init__`, `Trainer._symbolic_build`: input that cannot be split is
  refused at once;
- `optimizer.apply`, `variable.assign` and its siblings: replicas in `run`;
- `Variable.__repr__`: says where the variable is;
- `Model.save`, `save_weights` and `export`: only the chief of several workers writes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import keras

_STRATEGY_ATTRIBUTE = "_keras_strategies_strategy"
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


class _Route(threading.local):
    # The function that outermost layer calls of this thread go through.
    call: Callable[..., Any] | None = None


_route = _Route()
_installed: list[tuple[Any, str, Any]] = []


def install(hooks: ModelHooks) -> None:
    """Hooks Keras, once; later calls do nothing."""
    if _installed:
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
    from keras.src.saving import saving_lib
    from keras.src.trainers.epoch_iterator import EpochIterator

    Trainer = _base_trainer()

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
            route = _route.call
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
            if _applying.sink is not None:
                return _applying.sink(self, grads, trainable_variables)
            return hooks.optimizer_apply(
                self, functools.partial(original, self), grads, trainable_variables
            )

        return apply

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
            if data_batch is None and iterator is not None and _is_unbuilt(self):
                data_batch = _first_batch(iterator)
            if data_batch is not None:
                hooks.building(self, data_batch)
            original(self, iterator=iterator, data_batch=data_batch)

        return _symbolic_build

    def wrap_save(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
            if not hooks.saves(self):
                return None
            with hooks.writing(self, filepath) as path, _portable_optimizer(self):
                return original(self, path, *args, **kwargs)

        return save

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

    _replace(saving_lib, "_load_model_from_fileobj", wrap_load_model)
    _replace(Model, "load_weights", wrap_load_weights)
    for name in ("save", "save_weights", "export"):
        _replace(Model, name, wrap_save)
    _replace(Trainer, "_symbolic_build", wrap_build)
    _replace(EpochIterator, "__init__", wrap_epochs)
    _replace(BaseOptimizer, "apply", wrap_apply)
    _replace(LossScaleOptimizer, "apply", wrap_apply)
    _replace(KerasVariable, "assign", wrap_assign)
    _replace(KerasVariable, "assign_add", wrap_assign_add)
    _replace(KerasVariable, "assign_sub", wrap_assign_sub)
    _replace(KerasVariable, "__init__", wrap_variable_init)
    _replace(KerasVariable, "__repr__", wrap_repr)
    _replace(Trainer, "__init__", wrap_init)
    _replace(Trainer, "compile", wrap_method)
    for name in _METHODS:
        _replace(BackendTrainer, name, wrap_method)
    for kind in _STEPS:
        _replace(BackendTrainer, f"make_{kind}_function", wrap_make(kind))
    _replace(Layer, "__call__", wrap_call)
    _replace(BatchNormalization, "_moments", wrap_moments)


def _base_trainer() -> Any:
    """`Trainer` of Keras 3.15, which 3.16 calls `BaseTrainer`."""
    from keras.src.trainers import trainer

    return getattr(trainer, "BaseTrainer", None) or trainer.Trainer


def replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replaces one attribute of a Keras class for as long as hooks are installed."""
    _replace(owner, name, wrap)


def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    original = owner.__dict__[name]
    _installed.append((owner, name, original))
    setattr(owner, name, wrap(original))


def uninstall() -> None:
    """Takes every hook out again, for tests."""
    while _installed:
        owner, name, original = _installed.pop()
        setattr(owner, name, original)


def is_installed() -> bool:
    return bool(_installed)


# --- Models -------------------------------------------------------------------


def set_strategy(made: Any, strategy: Any) -> None:
    """Lets a model or a variable remember the strategy it was made under."""
    # object.__setattr__: neither Keras nor TensorFlow is to track a strategy.
    object.__setattr__(made, _STRATEGY_ATTRIBUTE, strategy)


@contextlib.contextmanager
def _portable_optimizer(model: Any) -> Iterator[None]:
    """Saves a model's optimizer as one that every backend has.

    Keras 3.15 on Torch: an optimizer is of a class in `keras.src.backend.torch`, and a
    file that says so makes an optimizer for Torch tensors on any backend.
    """
    optimizer = getattr(model, "optimizer", None)
    changed = []
    while optimizer is not None:
        kind = type(optimizer)
        if kind.__module__.startswith("keras.src.backend."):
            public = next(
                c
                for c in kind.__mro__
                if c.__module__.startswith("keras.src.optimizers.")
            )
            object.__setattr__(optimizer, "__class__", public)
            changed.append((optimizer, kind))
        optimizer = getattr(optimizer, "inner_optimizer", None)
    try:
        yield
    finally:
        for optimizer, kind in changed:
            object.__setattr__(optimizer, "__class__", kind)


def strategy_of(made: Any) -> Any:
    """The strategy that a model or variable was made under; None without one."""
    return made.__dict__.get(_STRATEGY_ATTRIBUTE)


def seed_states(model: Any) -> list[Any]:
    """The variables of a model's seed generators.

    Keras 3.15: `SeedGenerator.state` is a variable of this name. Keras saves what
    layers own, which these are not.
    """
    return [v for v in model.variables if v.name == "seed_generator_state"]


def is_built(layer: Any) -> bool:
    """Whether a layer and all its sublayers have their variables.

    Keras 3.15: `Layer._flatten_layers`, as `Trainer._symbolic_build` uses it.
    """
    return all(sublayer.built for sublayer in layer._flatten_layers())


def _is_unbuilt(model: Any) -> bool:
    """Whether `Trainer._symbolic_build` of Keras 3.15 will look at a batch."""
    parts = (model._compile_metrics, model._compile_loss)
    unbuilt = [part for part in parts if part is not None and not part.built]
    return bool(unbuilt) or not is_built(model)


def _first_batch(iterator: Any) -> Any:
    """The first batch of an epoch iterator, which Keras resets after building."""
    for _, _, batches in iterator:
        return batches[0] if isinstance(batches, (list, tuple)) else next(batches)
    return None


def element_spec(adapter: Any) -> Any:
    """The `element_spec` of the tf.data dataset behind an adapter, None without one.

    Keras 3.15: `TFDatasetAdapter._dataset`.
    """
    from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter

    if isinstance(adapter, TFDatasetAdapter):
        return adapter._dataset.element_spec
    return None


def symbolic_build(model: Any, batch: Any) -> None:
    """Builds model, losses, metrics and optimizer from the shapes of a batch.

    Keras 3.15: `Trainer._symbolic_build(data_batch=...)`, which reads `shape` and
    `dtype` of the leaves only.
    """
    model._symbolic_build(data_batch=batch)


# --- Input --------------------------------------------------------------------


def py_dataset_batches(dataset: Any) -> Iterator[Any]:
    """One pass over a `keras.utils.PyDataset`, by its workers.

    Keras 3.15: `PyDatasetAdapter`, whose `on_epoch_begin` and `on_epoch_end` start
    and stop the workers and call the dataset's methods of the same names.
    """
    from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

    adapter = PyDatasetAdapter(dataset)
    adapter.on_epoch_begin()
    try:
        yield from adapter.get_numpy_iterator()
    finally:
        adapter.on_epoch_end()


def batches_adapter(
    batches: Callable[[], Iterator[Any]],
    num_batches: int | None,
    class_weight: dict[int, float] | None = None,
) -> Any:
    """What `fit`, `evaluate` and `predict` take as `x`: a function of batches.

    Keras 3.15: `get_data_adapter` returns a `DataAdapter` as it is, without regard to
    `class_weight`; `GeneratorDataAdapter` turns an iterator into what each backend
    reads, and knows neither a length nor a second pass.

    Args:
        batches: starts a pass: an iterator of `x`, `(x, y)` or
            `(x, y, sample_weight)`.
        num_batches: int, how many there are; None where it is unknown.
        class_weight: dict, weights of samples by their class.
    """
    from keras.src.trainers.data_adapters import data_adapter_utils
    from keras.src.trainers.data_adapters.generator_data_adapter import (
        GeneratorDataAdapter,
    )

    def standard() -> Iterator[Any]:
        for batch in batches():
            # A list, as loaders make it, is one array to TensorFlow.
            yield tuple(batch) if isinstance(batch, list) else batch

    def weighted() -> Iterator[Any]:
        for batch in standard():
            x, y, sample_weight = data_adapter_utils.unpack_x_y_sample_weight(batch)
            if sample_weight is not None:
                raise ValueError(
                    "You cannot specify `class_weight` and `sample_weight` at the "
                    "same time."
                )
            weights = data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
            yield x, y, weights

    class BatchesAdapter(GeneratorDataAdapter):
        def __init__(self) -> None:
            self.generator = standard if class_weight is None else weighted
            self._output_signature = None

        @property
        def _first_batches(self) -> list[Any]:
            found = itertools.islice(
                self.generator(), data_adapter_utils.NUM_BATCHES_FOR_TENSOR_SPEC
            )
            return list(found)

        @property
        def num_batches(self) -> int | None:
            return num_batches

    return BatchesAdapter()


def is_adapter(value: Any) -> bool:
    """Whether a value is what `batches_adapter` makes."""
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

    return isinstance(value, DataAdapter)


class BatchPlacer(Protocol):
    """Puts the batches of training loops on devices, on JAX and Torch."""

    def batches(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The batches, each on the devices when it is asked for."""


class DatasetPlacer(Protocol):
    """Puts the batches of training loops on devices, on TensorFlow."""

    def dataset(self, dataset: Any) -> Any:
        """The data set, with its batches on the devices."""


class _Input(threading.local):
    # Places the batches of this thread; None leaves it to Keras.
    placer: Any = None


_input = _Input()


@contextlib.contextmanager
def batches_placed_by(
    placer: BatchPlacer | DatasetPlacer | None,
) -> Iterator[None]:
    """Makes a placer this thread's own; None leaves batches to Keras."""
    previous = _input.placer
    _input.placer = placer
    try:
        yield
    finally:
        _input.placer = previous


def hook_torch_input() -> None:
    """Lets a `BatchPlacer` place batches on Torch; later calls do nothing.

    Keras 3.15: `TorchEpochIterator._get_iterator`.
    """
    from keras.src.backend.torch import trainer

    def wrap_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _get_iterator(self: Any) -> Any:
            batches = original(self)
            placer = _input.placer
            return batches if placer is None else placer.batches(batches)

        return _get_iterator

    if not any(owner is trainer.TorchEpochIterator for owner, _, _ in _installed):
        _replace(trainer.TorchEpochIterator, "_get_iterator", wrap_iterator)


def hook_tensorflow_input() -> None:
    """Lets a `DatasetPlacer` place batches on TensorFlow; later calls do nothing.

    Keras 3.15: `TFEpochIterator.__init__` keeps the data set in
    `_distributed_dataset`, which is iterated over in each epoch.
    """
    from keras.src.backend.tensorflow import trainer

    def wrap_init(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if _input.placer is not None:
                placed = _input.placer.dataset(self._distributed_dataset)
                self._distributed_dataset = placed

        return __init__

    if not any(owner is trainer.TFEpochIterator for owner, _, _ in _installed):
        _replace(trainer.TFEpochIterator, "__init__", wrap_init)


# --- Layer calls --------------------------------------------------------------


@contextlib.contextmanager
def layer_calls_through(
    route: Callable[..., Any] | None,
) -> Iterator[None]:
    """Sends this thread's outermost layer calls to `route`.

    `route(layer, call, args, kwargs)` stands in for `layer(*args, **kwargs)`;
    `call` is the original. None lets calls through again.
    """
    previous = _route.call
    _route.call = route
    try:
        yield
    finally:
        _route.call = previous


def trained_variables(optimizer: Any) -> Any:
    """The variables that an optimizer was built for.

    Keras 3.15: `BaseOptimizer._trainable_variables`.
    """
    return optimizer._trainable_variables


def layer_settings(layer: Any) -> Any:
    """What a layer's call depends on beside its weights, equal if that is the same.

    Keras 3.15: `Layer._flatten_layers`. Switches of Keras's own begin with an
    underscore, except for `built`, which the first call changes.
    """
    return tuple(
        (
            sublayer.trainable,
            *(
                (name, value)
                for name, value in vars(sublayer).items()
                if isinstance(value, (bool, int, float, str))
                and not name.startswith("_")
                and name != "built"
            ),
        )
        for sublayer in layer._flatten_layers()
    )


def wraps_torch_modules(layer: Any) -> bool:
    """Whether a layer contains torch modules that hold parameters of their own.

    Keras 3.15 wraps each in a `TorchModuleWrapper`, whose call reads the module's
    parameters and not the Keras variables that stand for them.
    """
    from keras.src.utils.torch_utils import TorchModuleWrapper

    return any(isinstance(sub, TorchModuleWrapper) for sub in layer._flatten_layers())


def clear_losses(layer: Any) -> None:
    """Forgets the losses of the last call, as an outermost call does.

    Keras 3.15: `Layer._get_call_context` calls `Layer._clear_losses`.
    """
    layer._clear_losses()


def get_mask(tensor: Any) -> Any:
    """The mask that Keras attached to a tensor, or None (`get_keras_mask`)."""
    from keras.src.backend.common import masking

    return masking.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Attaches a mask to a tensor, where Keras looks for it (`set_keras_mask`)."""
    from keras.src.backend.common import masking

    masking.set_keras_mask(tensor, mask)


# --- Variables and thread state -----------------------------------------------


def raw_value(variable: Any) -> Any:
    """The backend's own variable or array, before scopes and autocast.

    Keras 3.15: `KerasVariable._value`.
    """
    return variable._value


def all_variables(model: Any) -> list[Any]:
    """The variables of a model, its optimizer and its metrics, each once."""
    found = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        found += model.optimizer.variables
    found += getattr(model, "metrics_variables", [])
    unique = {id(variable): variable for variable in found}
    return [v for v in unique.values() if raw_value(v) is not None]


def build_optimizer(model: Any) -> None:
    """Makes the optimizer's variables of a built model, which `fit` does at once."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and model.built and not optimizer.built:
        optimizer.build(model.trainable_variables)


def initial_epoch(model: Any) -> int:
    """The epoch that `fit` begins with, where a backup has been restored.

    Keras 3.15: `BackupAndRestore` sets `_initial_epoch`.
    """
    return int(getattr(model, "_initial_epoch", 0) or 0)


def set_initial_epoch(model: Any, epoch: int) -> None:
    model._initial_epoch = epoch


def skip_steps(
    model: Any,
    count: int,
    logs: dict[str, float],
    metrics: Any,
    at_end: Callable[[], None],
) -> None:
    """Makes the next calls of `model.train_function` read batches and do nothing else.

    Keras 3.15: `fit` calls it with a list of batches on Torch, an iterator on
    TensorFlow, and a state and an iterator on JAX, of which the metrics' variables are
    the fourth part.

    Args:
        model: a model whose `fit` has begun.
        count: int, how many calls.
        logs: dict, what they return.
        metrics: the values of the metrics' variables afterwards.
        at_end: called after the last one.
    """
    original = model.train_function
    per_call = int(model.steps_per_execution)
    left = count
    backend = keras.backend.backend()

    def passed() -> bool:
        nonlocal left
        left -= 1
        if left == 0:
            model.train_function = original
            at_end()
        return left == 0

    def restore() -> None:
        for variable, value in zip(model.metrics_variables, metrics, strict=True):
            variable.assign(value)

    def on_torch(data: Any) -> Any:
        if passed():
            restore()
        return logs

    def on_tensorflow(iterator: Any) -> Any:
        for _ in itertools.islice(iterator, per_call):
            pass
        if passed():
            restore()
        return logs

    def on_jax(state: Any, iterator: Any) -> Any:
        for _ in itertools.islice(iterator, per_call):
            pass
        if passed():
            values = [
                keras.ops.convert_to_tensor(value, variable.dtype)
                for variable, value in zip(
                    model.metrics_variables, metrics, strict=True
                )
            ]
            state = (*state[:3], values)
        return logs, state

    functions = {"torch": on_torch, "tensorflow": on_tensorflow, "jax": on_jax}
    model.train_function = functions[backend]


class IdSet:
    """Objects that are known by identity, and forgotten when they end."""

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[Any]] = {}

    def add(self, value: Any) -> None:
        key = id(value)
        self._references[key] = weakref.ref(
            value, lambda _: self._references.pop(key, None)
        )

    def __contains__(self, value: Any) -> bool:
        reference = self._references.get(id(value))
        return reference is not None and reference() is value


def guard_value(variable: Any, check: Callable[[Any], None]) -> None:
    """Calls `check(variable)` whenever the variable's value is asked for.

    Keras 3.15: `KerasVariable.value`, which everything reads that does not assign;
    `_direct_assign` reads it too on Torch.
    """
    kind: Any = type(variable)
    variable.__class__ = _guarded(kind, check)


@functools.cache
def _guarded(kind: Any, check: Callable[[Any], None]) -> Any:
    class Guarded(kind):
        _is_assigned = False

        @property
        def value(self) -> Any:
            if not self._is_assigned:
                check(self)
            return super().value

        def _direct_assign(self, value: Any) -> None:
            self._is_assigned = True
            try:
                super()._direct_assign(value)
            finally:
                self._is_assigned = False

    Guarded.__name__ = kind.__name__
    Guarded.__qualname__ = kind.__qualname__
    return Guarded


def seed_offset(variable: Any, replica_id: int) -> int:
    """What to add to the first element of a seed state on one replica.

    The states of `keras.random.SeedGenerator` are `[seed, count]`, named
    `seed_generator_state`; Torch seeds with their sum, so the offsets of replicas
    lie far apart (multiples of 2^31 / the golden ratio), not side by side.
    Any other variable has the offset 0.
    """
    if variable.name != "seed_generator_state":
        return 0
    return (replica_id * 1_327_217_885) % 2**31


def current_stateless_scope() -> Any:
    """The innermost `keras.StatelessScope` of this thread, or None."""
    from keras.src.backend.common.stateless_scope import get_stateless_scope

    return get_stateless_scope()


@contextlib.contextmanager
def outside_stateless_scopes() -> Iterator[None]:
    """Reads and assigns variables themselves, whatever scope is open.

    Keras 3.15: the global attribute "stateless_scope".
    """
    from keras.src.backend.common import global_state

    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def thread_state() -> dict[str, Any]:
    """Keras's state of this thread: autocast and name scopes, device, and so on.

    Keras 3.15: `keras.src.backend.common.global_state.GLOBAL_STATE_TRACKER`, a
    `threading.local` that `clear_session` replaces.
    """
    from keras.src.backend.common import global_state

    return dict(vars(global_state.GLOBAL_STATE_TRACKER))


@contextlib.contextmanager
def with_thread_state(state: dict[str, Any]) -> Iterator[None]:
    """Gives this thread another thread's Keras state."""
    from keras.src.backend.common import global_state

    own = vars(global_state.GLOBAL_STATE_TRACKER)
    saved = dict(own)
    own.clear()
    own.update(state)
    # The call context belongs to the thread whose layers are being called.
    own.pop("current_call_ctx", None)
    try:
        yield
    finally:
        own.clear()
        own.update(saved)


def set_raw_value(variable: Any, value: Any) -> None:
    """Gives a variable another array of the same shape, dtype and place.

    Keras 3.15: `KerasVariable._value`; `assign` would convert and place it again.
    """
    variable._value = value


def has_deferred_variables() -> bool:
    """Whether variables were made in a stateless scope and wait for their values.

    Keras 3.15: the global attribute "uninitialized_variables". The list is made if
    there is none, so that threads that take over this one's state share it.
    """
    from keras.src.backend.common import global_state

    return bool(
        global_state.get_global_attribute(
            "uninitialized_variables", [], set_to_default=True
        )
    )


def build_optimizer_without_values(optimizer: Any, variables: list[Any]) -> None:
    """`optimizer.build` for variables that have no values.

    Keras 3.15 on TensorFlow: `TFOptimizer._var_key` asks for the `tf.Variable`.
    """
    object.__setattr__(optimizer, "_var_key", id)
    try:
        optimizer.build(variables)
    finally:
        object.__delattr__(optimizer, "_var_key")


@contextlib.contextmanager
def forgetting_deferred_variables() -> Iterator[None]:
    """Variables that are made inside, in a stateless scope, never get values.

    Keras 3.15: the global attribute "uninitialized_variables".
    """
    from keras.src.backend.common import global_state

    before = list(global_state.get_global_attribute("uninitialized_variables", []))
    try:
        yield
    finally:
        global_state.set_global_attribute("uninitialized_variables", before)


def initialize_deferred_variables(scope_of: Callable[[Any], Any]) -> bool:
    """Gives variables that were made in a stateless scope their values.

    Keras 3.15: as `initialize_all_variables`, by `KerasVariable._deferred_initialize`.

    Args:
        scope_of: gives the context manager to do it in, or None.

    Returns:
        Whether there were any.
    """
    from keras.src.backend.common import global_state

    waiting = global_state.get_global_attribute("uninitialized_variables", [])
    global_state.set_global_attribute("uninitialized_variables", [])
    for variable in waiting:
        with scope_of(variable) or contextlib.nullcontext():
            variable._deferred_initialize()
    return bool(waiting)


# --- JAX ----------------------------------------------------------------------

# What each kind of loop carries from step to step, in the order of its state.
_STATE_NAMES = {
    "train": (
        "trainable_variables",
        "non_trainable_variables",
        "optimizer_variables",
        "metrics_variables",
    ),
    "test": ("trainable_variables", "non_trainable_variables", "metrics_variables"),
    "predict": ("trainable_variables", "non_trainable_variables"),
}


def hook_jax_input() -> None:
    """Lets a `BatchPlacer` place batches on JAX; later calls do nothing.

    It has a method `place(batch)` as well, for `train_on_batch` and its siblings.

    Keras 3.15: `JAXEpochIterator._get_iterator` keeps the layouts of the first
    batch for all; `_distribute_data` serves `train_on_batch` and `test_on_batch`.
    """
    from keras.src.backend.jax import trainer

    def wrap_iterator(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _get_iterator(self: Any) -> Any:
            placer = _input.placer
            if placer is None:
                return original(self)
            return placer.batches(self.data_adapter.get_jax_iterator())

        return _get_iterator

    def wrap_distribute(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _distribute_data(data: Any, *args: Any, **kwargs: Any) -> Any:
            if _input.placer is None:
                return original(data, *args, **kwargs)
            return _input.placer.place(data)

        return _distribute_data

    if not any(owner is trainer for owner, _, _ in _installed):
        _replace(trainer, "_distribute_data", wrap_distribute)
        _replace(trainer.JAXEpochIterator, "_get_iterator", wrap_iterator)


def hook_jax_placement(
    put: Callable[[Any, Any], Any], is_spread: Callable[[Any], bool]
) -> None:
    """Lets `put(array, sharding)` place variables on devices of several processes.

    Keras 3.15: `distribute_tensor` of the JAX backend's `distribution_lib`, which
    `JaxVariable._direct_assign` calls. `jax.device_put`, which it uses, asks all
    processes whether they have the same value, even where only one may have it yet.

    Args:
        put: places an array that this process has.
        is_spread: says whether an array lies on devices of several processes.
    """
    from keras.src.backend.jax import distribution_lib

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def distribute_tensor(tensor: Any, layout: Any) -> Any:
            import jax

            sharding = getattr(layout, "backend_layout", layout)
            if (
                not isinstance(sharding, jax.sharding.Sharding)
                or sharding.is_fully_addressable
                or isinstance(tensor, jax.core.Tracer)
                or is_spread(tensor)
            ):
                return original(tensor, layout)
            return put(tensor, sharding)

        return distribute_tensor

    if not any(owner is distribution_lib for owner, _, _ in _installed):
        _replace(distribution_lib, "distribute_tensor", wrap)


def record_jax_state(model: Any, kind: str, state: Any) -> None:
    """Says which arrays the variables stand for while a loop is under way.

    Keras 3.15 on JAX takes the values away from the variables for the length of
    an epoch and notes the current ones in `_jax_state` after each step, which is
    too late for an exception in a step.
    """
    # object.__setattr__: Keras would track the arrays.
    names = _STATE_NAMES[kind]
    object.__setattr__(model, "_jax_state", dict(zip(names, state, strict=True)))


def sync_jax_state(model: Any) -> None:
    """Gives the variables of a model in a loop their current values."""
    model.jax_state_sync()


def restore_jax_state(model: Any) -> None:
    """Gives the variables their values back after a loop ended with an error.

    `fit` of Keras 3.15 does so, `evaluate`, `predict` and `*_on_batch` do not.
    """
    state = getattr(model, "_jax_state", None) or {}
    arrays = [array for group in state.values() for array in group]
    # A program that failed while it ran has used up what it was given.
    if not any(array.is_deleted() for array in arrays):
        model.jax_state_sync()


def move_variable(variable: Any, layout: Any) -> None:
    """Changes the layout that a variable's values have, now and in future.

    Keras 3.15: `JaxVariable._layout` (None, or a `TensorLayout`), which
    `_direct_assign` applies.
    """
    variable._layout = layout
    if variable._value is not None:
        variable._direct_assign(variable._value)


def set_layout(variable: Any, layout: Any) -> None:
    """Gives a variable without a value the layout that one would have.

    Keras 3.15: `JaxVariable._layout`.
    """
    variable._layout = layout


def layout_of(variable: Any) -> Any:
    """The layout that a variable's values have on JAX, None without one."""
    return variable._layout


# --- TensorFlow ---------------------------------------------------------------


def hook_tensorflow(
    on_replica: Callable[[], bool],
    has_several_devices: Callable[[Any], bool],
    initialize: Callable[[Any, Callable[[Any], None], Any], None],
) -> None:
    """Tells Keras what it cannot see of replicas; later calls do nothing.

    Args:
        on_replica: whether code runs on one of several replicas.
        has_several_devices: whether a model is trained on several devices.
        initialize: `initialize(variable, original, value)`, called instead of
            `original(value)`, which makes the `tf.Variable` of a variable.

    Keras 3.15: `scale_loss_for_distribution` and its inverse divide by the number
    of replicas in a `tf.distribute` strategy; where `on_replica()`, losses are of
    the replica's rows already. `Trainer._resolve_auto_jit_compile` chooses XLA on
    accelerators, which cannot compile a program for several of them.
    `Variable._initialize` makes the `tf.Variable`, at once or later.
    """
    from keras.src.backend import Variable
    from keras.src.losses import loss

    Trainer = _base_trainer()
    owner = next(base for base in Variable.__mro__ if "_initialize" in vars(base))

    def wrap_scale(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def scale(value: Any) -> Any:
            return value if on_replica() else original(value)

        return scale

    def wrap_resolve(original: Callable[..., bool]) -> Callable[..., bool]:
        @functools.wraps(original)
        def _resolve_auto_jit_compile(self: Any) -> bool:
            return not has_several_devices(self) and original(self)

        return _resolve_auto_jit_compile

    def wrap_initialize(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def _initialize(self: Any, value: Any) -> None:
            initialize(self, functools.partial(original, self), value)

        return _initialize

    if not any(hooked is loss for hooked, _, _ in _installed):
        _replace(owner, "_initialize", wrap_initialize)
        _replace(loss, "scale_loss_for_distribution", wrap_scale)
        _replace(loss, "unscale_loss_for_distribution", wrap_scale)
        _replace(Trainer, "_resolve_auto_jit_compile", wrap_resolve)


def is_in_optimizer() -> bool:
    """Whether an optimizer makes the variables that are being made.

    Keras 3.15: the global attribute "name_scope_stack"; optimizers make variables in
    `name_scope(..., caller=self)`.
    """
    from keras.src.backend.common import global_state
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    scopes = global_state.get_global_attribute("name_scope_stack") or []
    return any(isinstance(scope.caller, BaseOptimizer) for scope in scopes)


def holds_tf_variables(layer: Any) -> bool:
    """Whether a layer holds variables or modules of TensorFlow, not of Keras.

    Keras 3.15: `Layer._flatten_layers`; Keras's own variables are `keras.Variable`.
    """
    import tensorflow as tf

    def is_foreign(value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(is_foreign(item) for item in value)
        return isinstance(value, (tf.Variable, tf.Module))

    return any(
        is_foreign(value)
        for sublayer in layer._flatten_layers()
        for value in vars(sublayer).values()
    )


# --- Parameter servers --------------------------------------------------------


def variable_maker() -> Any:
    """The layer, metric or optimizer that is making a variable now, or None.

    Keras 3.15: the global attribute "name_scope_stack", whose entries have the
    `caller` that `name_scope` was given.
    """
    from keras.src.backend.common import global_state

    stack = global_state.get_global_attribute("name_scope_stack")
    return stack[-1].caller if stack else None


def is_optimizer(made: Any) -> bool:
    """Whether something is an optimizer (`BaseOptimizer` of Keras 3.15)."""
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    return isinstance(made, BaseOptimizer)


class VariableHost(Protocol):
    """What keeps the values of variables that are not in this process."""

    #: Whether variables have values of their own just now.
    is_local: bool

    def create(self, variable: Any, value: Any) -> None:
        """A variable begins with this value, a tensor or a function that makes it."""

    def create_with(self, variable: Any, initializer: Callable[..., Any]) -> None:
        """A variable begins with what an initializer makes."""

    def read(self, variable: Any) -> Any:
        """The whole value, a NumPy array."""

    def write(self, variable: Any, value: Any) -> None:
        """Sets the whole value."""

    def add(self, variable: Any, delta: Any) -> None:
        """Adds to the whole value, in one piece."""


class RemoteValue:
    """Stands in a variable for a value that is elsewhere.

    Keras asks `_value` for a shape when it is made, and for `requires_grad` on Torch.
    """

    def __init__(self, shape: Any, dtype: Any):
        self.shape = tuple(shape)
        self.dtype = dtype
        self.requires_grad = False


def host_made_variable(variable: Any, host: VariableHost) -> None:
    """Lets a variable that has been made keep its value in a `VariableHost`."""
    host_variable(variable, host)


def host_variable(variable: Any, host: VariableHost) -> None:
    """Lets a variable that is about to be made keep its value in a `VariableHost`.

    Keras 3.15: `KerasVariable.__init__` and `_deferred_initialize` call `_initialize`
    or `_initialize_with_initializer`; `value` is what everything reads, and
    `_direct_assign` what everything writes.
    """
    kind: Any = type(variable)
    object.__setattr__(variable, "_keras_strategies_host", host)
    variable.__class__ = _hosted(kind)


def host_of(variable: Any) -> Any:
    """What keeps a variable's value, None if it does itself."""
    return variable.__dict__.get("_keras_strategies_host")


@functools.cache
def _hosted(kind: Any) -> Any:
    import keras

    class Hosted(kind):
        def _initialize(self, value: Any) -> None:
            host = host_of(self)
            host.create(self, value() if callable(value) else value)
            shape = value.shape if self._shape is None else self._shape
            self._value = RemoteValue(shape, self._dtype)

        def _initialize_with_initializer(self, initializer: Any) -> None:
            self._value = RemoteValue(self._shape, self._dtype)
            host_of(self).create_with(self, initializer)

        @property
        def value(self) -> Any:
            if host_of(self).is_local:
                return super().value
            scope = current_stateless_scope()
            if scope is not None:
                found = scope.get_current_value(self)
                if found is None:
                    # Shapes are being worked out; nothing reads the number.
                    found = keras.ops.zeros(self._shape, dtype=self._dtype)
                return self._maybe_autocast(found)
            if self._value is None:
                return self._maybe_autocast(
                    keras.ops.zeros(self._shape, dtype=self._dtype)
                )
            value = keras.ops.convert_to_tensor(host_of(self).read(self), self._dtype)
            return self._maybe_autocast(value)

        def _direct_assign(self, value: Any) -> None:
            host_of(self).write(self, value)

        def assign_add(self, value: Any) -> Any:
            if current_stateless_scope() is not None or host_of(self).is_local:
                return super().assign_add(value)
            return host_of(self).add(self, value)

        def assign_sub(self, value: Any) -> Any:
            if current_stateless_scope() is not None or host_of(self).is_local:
                return super().assign_sub(value)
            return host_of(self).add(self, -keras.ops.convert_to_tensor(value))

        def numpy(self) -> Any:
            return host_of(self).read(self)

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            found = host_of(self).read(self)
            return found if dtype is None else found.astype(dtype)

        def __len__(self) -> int:
            return int(self._shape[0])

        def __getitem__(self, index: Any) -> Any:
            if current_stateless_scope() is not None or host_of(self).is_local:
                return self.value[index]
            return keras.ops.convert_to_tensor(host_of(self).read_slice(self, index))

        def __repr__(self) -> str:
            return (
                f"<Variable path={self.path}, shape={tuple(self._shape)}, "
                f"dtype={self._dtype}, {host_of(self).place(self)}>"
            )

    Hosted.__name__ = kind.__name__
    Hosted.__qualname__ = kind.__qualname__
    return Hosted


def plain_optimizer(optimizer: Any) -> None:
    """Takes from an optimizer what binds it to `tf.Variable`s.

    Keras 3.15 on TensorFlow: `TFOptimizer` reads the `tf.Variable` of each variable
    and updates through `tf.distribute`. With the methods of `BaseOptimizer` it works
    in a `StatelessScope`, as on the other backends.
    """
    kind: Any = type(optimizer)
    plain = _plain(kind)
    if plain is not kind:
        object.__setattr__(optimizer, "__class__", plain)


@functools.cache
def _plain(kind: Any) -> Any:
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    backend_kinds = [k for k in kind.__mro__ if k.__name__ == "TFOptimizer"]
    if not backend_kinds:
        return kind
    names = {
        name
        for name, value in vars(backend_kinds[0]).items()
        if callable(value) and name != "__init__" and hasattr(BaseOptimizer, name)
    }
    methods = {name: getattr(BaseOptimizer, name) for name in names}
    return type(kind.__name__, (kind,), {**methods, "__module__": kind.__module__})


def optimizer_kind(optimizer: Any) -> Any:
    """The class that an optimizer had before `plain_optimizer`."""
    kind = type(optimizer)
    return kind.__mro__[1] if _plain(kind.__mro__[1]) is kind else kind


def hook_slots(on_slot: Callable[[Any, Any], None]) -> None:
    """Calls `on_slot(slot, reference)` for each optimizer variable of a variable's own.

    Keras 3.15: `BaseOptimizer.add_variable_from_reference`. Later calls do nothing.
    """
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def add(
            self: Any,
            reference_variable: Any,
            name: Any = None,
            initializer: Any = "zeros",
        ) -> Any:
            previous = _slot.reference
            _slot.reference = reference_variable
            try:
                slot = original(
                    self, reference_variable, name=name, initializer=initializer
                )
            finally:
                _slot.reference = previous
            on_slot(slot, reference_variable)
            return slot

        return add

    name = "add_variable_from_reference"
    if not any(owner is BaseOptimizer and n == name for owner, n, _ in _installed):
        _replace(BaseOptimizer, name, wrap)


class _Slot(threading.local):
    # The variable that an optimizer variable is being made for.
    reference: Any = None


_slot = _Slot()


def slot_reference() -> Any:
    """The variable that an optimizer's own is being made for now, or None."""
    return _slot.reference


class _Applying(threading.local):
    # Takes the gradients of this thread's `optimizer.apply`.
    sink: Callable[..., Any] | None = None


_applying = _Applying()


@contextlib.contextmanager
def applying_through(sink: Callable[..., Any]) -> Iterator[None]:
    """Calls `sink(optimizer, gradients, variables)` instead of `optimizer.apply`."""
    previous = _applying.sink
    _applying.sink = sink
    try:
        yield
    finally:
        _applying.sink = previous


class _Lookups(threading.local):
    # Stands in for `ops.take` in this thread; None leaves it to Keras.
    take: Callable[..., Any] | None = None


_lookups = _Lookups()


def hook_lookups() -> None:
    """Lets a thread look up rows of variables itself; later calls do nothing.

    Keras 3.15: `Embedding.call` and `ops.take` call `backend.numpy.take(x, indices,
    axis)`, with the variable itself for `x`.
    """
    from keras.src import backend

    module = backend.numpy

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def take(x: Any, indices: Any, axis: Any = None) -> Any:
            if _lookups.take is not None:
                found = _lookups.take(x, indices, axis)
                if found is not NotImplemented:
                    return found
            return original(x, indices, axis=axis)

        return take

    if not any(owner is module and name == "take" for owner, name, _ in _installed):
        _replace(module, "take", wrap)


@contextlib.contextmanager
def lookups_through(take: Callable[..., Any] | None) -> Iterator[None]:
    """Sends this thread's `ops.take` to `take(x, indices, axis)`.

    It may return `NotImplemented` to leave a call to Keras.
    """
    previous = _lookups.take
    _lookups.take = take
    try:
        yield
    finally:
        _lookups.take = previous


def hook_torch_layers() -> None:
    """Keeps Torch's layers from reading variables that are not in this process.

    Keras 3.15: `TorchLayer._track_variables` and `_post_track_variable` put the value
    of each variable into `_torch_params`. Later calls do nothing.
    """
    from keras.src.backend.torch import layer
    from torch.nn import ParameterDict

    kind = layer.TorchLayer

    def wrap_all(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _track_variables(self: Any) -> None:
            if any(host_of(variable) is not None for variable in self.variables):
                self._torch_params = ParameterDict()
            else:
                original(self)

        return _track_variables

    def wrap_one(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _post_track_variable(self: Any, variable: Any) -> None:
            if host_of(variable) is None:
                original(self, variable)

        return _post_track_variable

    if not any(owner is kind for owner, _, _ in _installed):
        _replace(kind, "_track_variables", wrap_all)
        _replace(kind, "_post_track_variable", wrap_one)


# What is left out of the state of models and layers that go to another process:
# programs, and what TensorFlow notes of its own.
_NOT_SENT = ("train_function", "test_function", "predict_function", "_jax_state")


def object_state(made: Any) -> dict[str, Any] | None:
    """What a Keras object is made of, to be made again in another process.

    Keras 3.15: `KerasSaveable.__reduce__` would save the values of all variables and
    make others; here objects keep who they are, and variables travel by reference.

    Returns:
        dict of attributes; None for what pickle can take as it is.
    """
    from keras.src.ops.operation import Operation
    from keras.src.saving.keras_saveable import KerasSaveable

    if not isinstance(made, (KerasSaveable, Operation)):
        return None
    state = {
        name: value
        for name, value in vars(made).items()
        if not name.startswith("_self_")
        and name not in (_STRATEGY_ATTRIBUTE, "_obj_reference_counts_dict")
    }
    for name in _NOT_SENT:
        if name in state:
            state[name] = None
    if "_torch_params" in state.get("_modules", {}):
        state["_modules"] = dict(state["_modules"])
        del state["_modules"]["_torch_params"]
    return state


def rebuilt(made: Any) -> tuple[Any, ...] | None:
    """How to make something of Keras again that pickle cannot; None for the rest.

    Keras 3.15: `DynamicBackend`, which preprocessing layers hold, asks itself for
    attributes before it has any.
    """
    from keras.src.utils.backend_utils import DynamicBackend

    if isinstance(made, DynamicBackend):
        return DynamicBackend, (vars(made)["_backend"],)
    return None


def container_state(made: Any) -> tuple[Any, ...] | None:
    """The contents and the tracker of a tracked container; None for other things.

    Keras 3.15: `keras.src.utils.tracking`, whose containers and trackers know what
    they track by `id`.
    """
    from keras.src.utils import tracking

    if isinstance(made, tracking.Tracker):
        return (None, dict(vars(made)))
    if isinstance(made, (tracking.TrackedList, tracking.TrackedSet)):
        return (list(made), made.tracker)
    if isinstance(made, (tracking.TrackedDict, tracking.TrackedOrderedDict)):
        return (dict(made), made.tracker)
    return None


def fill_container(made: Any, state: tuple[Any, ...]) -> None:
    """Gives a container made anew its contents."""
    contents, rest = state
    if contents is None:
        vars(made).update(rest)
        made.stored_ids = {name: set() for name in made.config}
        return
    made.tracker = None
    if isinstance(made, dict):
        dict.update(made, contents)
    elif isinstance(made, list):
        list.extend(made, contents)
    else:
        set.update(made, contents)
    made.tracker = rest


def renew_identities(made: Iterable[Any]) -> None:
    """Lets trackers and optimizers that were made anew know their parts by `id`.

    Keras 3.15: `Tracker.stored_ids`, `BaseOptimizer._trainable_variables_indices`.
    """
    from keras.src.utils import tracking

    for each in made:
        if isinstance(each, tracking.Tracker):
            each.stored_ids = {
                name: {id(value) for value in store}
                for name, (_, store) in each.config.items()
            }
        elif is_optimizer(each):
            each._trainable_variables_indices = {
                each._var_key(variable): i
                for i, variable in enumerate(each._trainable_variables)
            }


def weight_decay_applies(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer decays a variable (`_use_weight_decay` of Keras 3.15)."""
    return bool(optimizer._use_weight_decay(variable))


def set_weight_decay(optimizer: Any, applies: dict[int, bool]) -> None:
    """Says by the `id` of variables which of them an optimizer decays."""
    optimizer._use_weight_decay = lambda variable: applies.get(id(variable), True)


def clip_gradients(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """An optimizer's clipping, by norms of whole gradients (`_clip_gradients`)."""
    return list(optimizer._clip_gradients(gradients))


def stop_clipping(optimizer: Any) -> None:
    """Lets an optimizer take gradients as they are."""
    optimizer._clip_gradients = lambda gradients: gradients


class OpenShape(tuple[int, ...]):
    """A shape that is equal to every shape with as many axes.

    Keras 3.15: `StatelessScope` compares `Variable.shape` with a value's. In a step of
    a worker, a table has the value of its touched rows.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, tuple) and len(other) == len(self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(len(self))


def values_scope(mapping: Iterable[tuple[Any, Any]]) -> Any:
    """A `StatelessScope` in which variables have values of any shape.

    Keras 3.15: `StatelessScope.state_mapping`, from the `id` of a variable.
    """
    import keras

    scope = keras.StatelessScope()
    for variable, value in mapping:
        scope.state_mapping[id(variable)] = value
    return scope


def set_variable_shape(variable: Any, shape: tuple[int | None, ...]) -> None:
    """Lets a variable stand for values of another shape (`KerasVariable._shape`)."""
    variable._shape = shape


def make_variable(path: str, trainable: bool, dtype: str, value: Any) -> Any:
    """A variable with a path of its own, outside of every scope."""
    import keras

    with outside_stateless_scopes():
        name = path.rsplit("/", 1)[-1]
        made = keras.Variable(value, dtype=dtype, trainable=trainable, name=name)
    made._path = path
    return made


def epoch_iterator(**arguments: Any) -> Any:
    """`EpochIterator` of Keras 3.15: any input as epochs of batches.

    Iterating it gives `(begin step, end step, iterator of batches)`.
    """
    from keras.src.trainers.epoch_iterator import EpochIterator

    class NumpyEpochIterator(EpochIterator):
        def _get_iterator(self) -> Any:
            return self.data_adapter.get_numpy_iterator()

    return NumpyEpochIterator(**arguments)


def callback_list(callbacks: Any, **arguments: Any) -> Any:
    """`keras.callbacks.CallbackList`, of what `fit` was given."""
    import keras

    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(callbacks, **arguments)


def check_compiled(model: Any, method: str) -> None:
    """Raises Keras's own error for a model that was not compiled."""
    model._assert_compile_called(method)


def should_evaluate(model: Any, epoch: int, frequency: Any) -> bool:
    """Whether `fit` evaluates after an epoch (`Trainer._should_eval`)."""
    return bool(model._should_eval(epoch, frequency))


def resumed_epoch(model: Any) -> Any:
    """The epoch that `BackupAndRestore` has restored (`Trainer._initial_epoch`)."""
    return model._initial_epoch


def metrics_or_logs(model: Any, logs: Any) -> dict[str, Any]:
    """The metrics' results, or what a step returned (`_get_metrics_result_or_logs`)."""
    return dict(model._get_metrics_result_or_logs(logs))


def logs_in_order(model: Any, logs: Any) -> Any:
    """What `evaluate` and `*_on_batch` return (`_flatten_metrics_in_order`)."""
    return model._flatten_metrics_in_order(logs)


def split_for_validation(arrays: Any, share: float) -> Any:
    """`fit`'s `validation_split` (`array_slicing.train_validation_split`)."""
    from keras.src.trainers.data_adapters import array_slicing

    return array_slicing.train_validation_split(arrays, validation_split=share)


def sample_weights(y: Any, class_weight: Any) -> Any:
    """Weights of samples by their class (`class_weight_to_sample_weights`)."""
    from keras.src.trainers.data_adapters import data_adapter_utils

    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)
