"""The attributes of layers that determine their calls."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras

from keras_strategies.keras_compat.models.layers import sublayers
from keras_strategies.runtime.row_proofs.function_names import (
    FunctionNames,
    functions_of_class,
)
from keras_strategies.runtime.row_proofs.held_values import (
    OF_FRAMEWORKS,
    PLAIN,
    HeldValues,
    entries_of,
    holds_values,
    is_setting_of_class,
)
from keras_strategies.runtime.row_proofs.python_state import (
    attributes_of_layers,
    is_installed,
    is_object_of_user,
    is_of_python,
    is_of_user,
)

#: Attributes that calls and training of Keras 3.15 assign; no call depends on them.
_OF_LAYERS = frozenset(["_called", "_loss_ids", "_losses", "built"])
#: The same, of models.
_OF_TRAINING = frozenset(
    [
        "_called",
        "_compile_config",
        "_compile_loss",
        "_compile_metrics",
        "_compiled_trainable_state",
        "_distribute_strategy",
        "_eval_epoch_iterator",
        "_initial_epoch",
        "_jit_compile",
        "_loss_ids",
        "_loss_tracker",
        "_metrics",
        "_run_eagerly",
        "built",
        "compiled",
        "history",
        "loss",
        "optimizer",
        "predict_function",
        "steps_per_execution",
        "stop_evaluating",
        "stop_predicting",
        "stop_training",
        "test_function",
        "train_function",
        "unrolled_steps_per_execution",
    ]
)


class _Attributes(NamedTuple):
    """The attributes of a layer, as they were.

    Args:
        space: its `vars`.
        length: how many attributes it has.
        values_of: the values of those that may be settings.
        values: what they were.
    """

    space: dict[str, Any]
    length: int
    values_of: Callable[[Any], tuple[Any, ...]]
    values: tuple[Any, ...]


def _are_same(attributes: Iterable[_Attributes]) -> bool:
    """Whether layers have the attributes that they had."""
    for space, length, values_of, before in attributes:
        if len(space) != length:
            return False
        try:
            values = values_of(space)
        except KeyError:
            return False
        if not all(map(operator.is_, values, before)):
            return False
    return True


class LayerSettings:
    """Settings of the calls of a layer; a number tells whether they have changed.

    That are flags, functions and plain values among the attributes of the layer, of
    layers in it, and of what they hold; and those of modules and closures that the
    user's functions among them refer to, other layers among these.

    Args:
        layer: the layer.
    """

    def __init__(self, layer: Any):
        self._layer = layer
        self._known: dict[Any, int] = {}
        self._attributes: list[_Attributes] = []
        self._values = HeldValues()
        self._names = FunctionNames()
        self._number = -1

    def number(self) -> int:
        """The number of the current settings; equal settings have equal numbers.

        Fast where nothing was assigned since the last call.
        """
        if self._number < 0 or not self._is_same():
            self._values = HeldValues(sublayers(self._layer))
            self._names = FunctionNames()
            key = _settings(self._values, self._names)
            self._attributes = [_attributes(each) for each in self._values.layers]
            self._number = self._known.setdefault(key, len(self._known))
        return self._number

    @property
    def count(self) -> int:
        """How many different settings there were."""
        return len(self._known)

    @property
    def problem(self) -> str:
        """What the code can reach that may change unnoticed; "" for nothing."""
        return self._values.problem or self._names.problem

    def _is_same(self) -> bool:
        return (
            _are_same(self._attributes)
            and all(each.are_same for each in self._names.reads)
            and self._values.is_same()
        )


class ArgumentSettings:
    """What a call depends on in an argument that is no tensor and no plain value.

    Functions with the same code and the same values around them are equal.

    Args:
        value: the argument.

    Attributes:
        token: a hashable that is equal for an equal argument.
        problem: see `LayerSettings`.
    """

    def __init__(self, value: Any):
        values, names = HeldValues(), FunctionNames()
        code = value.__code__ if isinstance(value, types.FunctionType) else None
        own = values.token(value) if code is None else code
        functions = (*_functions_of_value(value), *_functions_of_class_of(value))
        found = _tokens_of_names(values, names, functions)
        self.token = own, type(value), found, _settings(values, names)
        self.problem = values.problem or names.problem


def _settings(values: HeldValues, names: FunctionNames) -> Any:
    """A key of the settings of layers, and of further ones that they reach."""
    key: list[Any] = []
    done = 0
    while done < len(values.layers):
        layers = values.layers[done:]
        done = len(values.layers)
        key += [_settings_of(values, layer) for layer in layers]
        key.append(_tokens_of_names(values, names, _functions_of(layers)))
    return tuple(key)


def _settings_of(values: HeldValues, layer: Any) -> Any:
    """The settings among a layer's attributes, and its flags."""
    return (
        id(layer),
        layer.trainable,
        layer.dtype_policy.name,
        tuple(
            (name, token)
            for name, value in list(vars(layer).items())
            if _may_be_setting(layer, name, value)
            and (token := values.token(value)) is not None
        ),
        tuple(map(values.token_of_class, _classes(type(layer)))),
    )


def _tokens_of_names(
    values: HeldValues, names: FunctionNames, functions: Iterable[types.FunctionType]
) -> Any:
    """What functions of the user's refer to in modules and closures."""
    found: list[Any] = []
    seen: set[int] = set()
    todo = names.add(functions)
    while todo:
        further: list[types.FunctionType] = []
        for value, is_of_installed in todo:
            if is_of_installed:
                found.append(values.token_of_name(value))
            elif isinstance(value, type):
                kinds = [] if is_installed(value) else _classes(value)
                found += map(values.token_of_class, kinds)
                further += _functions_of_classes(kinds, seen)
            else:
                found.append(values.token(value))
                further += _functions_of_value(value, seen)
        todo = names.add(further)
    return tuple(found)


def _functions_of(layers: Sequence[Any]) -> Iterator[types.FunctionType]:
    """The functions of the user's in layers, their classes and what they hold."""
    seen: set[int] = set()
    for layer in layers:
        yield from _functions_of_class_of(layer, seen)
        for name, value in list(vars(layer).items()):
            if _may_be_setting(layer, name, value):
                yield from _functions_of_value(value, seen)


def _classes(kind: type) -> list[type]:
    """The user's classes that determine what a class does."""
    every = (*kind.__mro__, type(kind))
    return [each for each in every if is_of_user(each) and not is_of_python(each)]


def _functions_of_class_of(
    value: Any, seen: set[int] | None = None
) -> Iterator[types.FunctionType]:
    kinds = _classes(type(value))
    return _functions_of_classes(kinds, set() if seen is None else seen)


def _functions_of_classes(
    kinds: Iterable[Any], seen: set[int]
) -> Iterator[types.FunctionType]:
    for kind in kinds:
        if id(kind) not in seen:
            seen.add(id(kind))
            yield from functions_of_class(kind)
            for name, each in list(vars(kind).items()):
                if is_setting_of_class(name, each):
                    yield from _functions_of_value(each, seen)


def _functions_of_value(
    value: Any, seen: set[int] | None = None
) -> Iterator[types.FunctionType]:
    seen = set() if seen is None else seen
    if isinstance(value, types.FunctionType):
        yield value
        return
    if isinstance(value, (*PLAIN, keras.Variable)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, keras.layers.Layer):
        return
    if is_object_of_user(value) and not is_installed(type(value)):
        yield from _functions_of_class_of(value, seen)
    elif not holds_values(value):
        return
    for each in entries_of(value):
        yield from _functions_of_value(each, seen)


def _attributes(layer: Any) -> _Attributes:
    space = vars(layer)
    names = [n for n, value in space.items() if _may_be_setting(layer, n, value)]
    # Two, so that the values are a tuple.
    names += [next(iter(space))] * max(0, 2 - len(names))
    values_of = operator.itemgetter(*names)
    return _Attributes(space, len(space), values_of, values_of(space))


def _may_be_setting(layer: Any, name: str, value: Any) -> bool:
    of_training = _OF_TRAINING if isinstance(layer, keras.Model) else _OF_LAYERS
    if name in of_training or name.startswith(OF_FRAMEWORKS):
        return False
    return name not in attributes_of_layers() or _is_flag(value)


def _is_flag(value: Any) -> bool:
    is_layer = isinstance(value, (keras.layers.Layer, keras.Variable))
    return isinstance(value, PLAIN) or (callable(value) and not is_layer)
