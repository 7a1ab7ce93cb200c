"""What parameter servers and their workers use of optimizers, lookups and variables."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.hosted import host_of
from keras_strategies.keras_compat.state import outside_stateless_scopes


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
    methods = {name: _of(BaseOptimizer, name) for name in names}
    # Next to the backend's class, so that an optimizer's own methods come before it.
    stands_before = type("PlainOptimizer", (backend_kinds[0],), methods)
    return type(kind.__name__, (kind, stands_before), {"__module__": kind.__module__})


def _of(kind: Any, name: str) -> Callable[..., Any]:
    """A method that is a class's at the time of the call: hooks come and go."""

    @functools.wraps(getattr(kind, name))
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(kind, name)(self, *args, **kwargs)

    return method


def optimizer_kind(optimizer: Any) -> Any:
    """The class that an optimizer had before `plain_optimizer`."""
    kind = type(optimizer)
    return kind.__mro__[1] if _plain(kind.__mro__[1]) is kind else kind


def add_slot(
    original: Any,
    self: Any,
    reference_variable: Any,
    name: Any = None,
    initializer: Any = "zeros",
) -> Any:
    previous = _slot.reference
    _slot.reference = reference_variable
    try:
        return original(self, reference_variable, name=name, initializer=initializer)
    finally:
        _slot.reference = previous


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


applying = _Applying()


@contextlib.contextmanager
def applying_through(sink: Callable[..., Any]) -> Iterator[None]:
    """Calls `sink(optimizer, gradients, variables)` instead of `optimizer.apply`."""
    patching.install("parameter servers")
    patching.install("custom loops")
    previous = applying.sink
    applying.sink = sink
    try:
        yield
    finally:
        applying.sink = previous


def shared_apply(
    original: Any, self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    # Without a sink, it is the optimizers that it calls that matter.
    call = original if applying.sink is None else applying.sink
    return call(self, grads, trainable_variables)


def stateless_apply(
    original: Any,
    self: Any,
    optimizer_variables: Any,
    grads: Any,
    trainable_variables: Any,
) -> Any:
    from keras.src.optimizers.base_optimizer import BaseOptimizer

    own = original if applying.sink is None else BaseOptimizer.stateless_apply
    return own(self, optimizer_variables, grads, trainable_variables)


class _Lookups(threading.local):
    # Stands in for `ops.take` in this thread; None leaves it to Keras.
    take: Callable[..., Any] | None = None


_lookups = _Lookups()


def take(original: Any, x: Any, indices: Any, axis: Any = None) -> Any:
    found = looked_up(x, indices, axis)
    if found is not NotImplemented:
        return found
    return original(x, indices, axis=axis)


def looked_up(x: Any, indices: Any, axis: Any) -> Any:
    """What this thread's lookups give; `NotImplemented` to leave it to Keras."""
    if _lookups.take is None:
        return NotImplemented
    return _lookups.take(x, indices, axis)


@contextlib.contextmanager
def lookups_through(take: Callable[..., Any] | None) -> Iterator[None]:
    """Sends this thread's `ops.take` to `take(x, indices, axis)`.

    It may return `NotImplemented` to leave a call to Keras.
    """
    previous = _lookups.take
    _lookups.take = take
    try:
        with patching.installed_while("lookups"):
            yield
    finally:
        _lookups.take = previous


def track_variables(original: Any, self: Any) -> None:
    from torch.nn import ParameterDict

    if any(host_of(variable) is not None for variable in self.variables):
        self._torch_params = ParameterDict()
    else:
        original(self)


def track_variable(original: Any, self: Any, variable: Any) -> None:
    if host_of(variable) is None:
        original(self, variable)


def weight_decay_applies(optimizer: Any, variable: Any) -> bool:
    """Whether an optimizer decays a variable (`_use_weight_decay` of Keras 3.15)."""
    return bool(optimizer._use_weight_decay(variable))


def set_weight_decay(optimizer: Any, applies: dict[int, bool]) -> None:
    """Says by the `id` of variables which of them an optimizer decays."""

    def is_decayed(variable: Any) -> bool:
        return applies.get(id(variable), True)

    decay = optimizer._apply_weight_decay

    def apply(variables: Any) -> None:
        # Of a list without any, Keras 3.15 on Torch makes an error.
        if any(map(is_decayed, variables)):
            decay(variables)

    optimizer._use_weight_decay = is_decayed
    optimizer._apply_weight_decay = apply


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


def set_initializer_seed(initializer: Any, seed: int) -> None:
    """Changes the seed of an initializer, also the one in its config.

    Keras 3.15: `RandomInitializer._init_seed`.
    """
    initializer.seed = initializer._init_seed = seed
