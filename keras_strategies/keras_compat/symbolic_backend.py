"""Functions of Keras's backend that record operations while a call is traced.

Code of Keras, and of users, calls functions of the backend directly: `backend.numpy`,
operators of variables, `self.backend` of a preprocessing layer. While a call is traced
in a thread, each function of the backend that `keras.ops` has too is that of
`keras.ops` for symbolic tensors. For other threads nothing changes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import keras

from keras_strategies.keras_compat import patching

Function = Callable[..., Any]
#: Modules of a backend with functions of `keras.ops`, and with loops over time.
_MODULES = ("core", "numpy", "nn", "math", "linalg", "image", "rnn")
#: Functions of frameworks that a trace would not notice: one with a backward pass of
#: the user's, and one of random numbers.
_GUARDED = (
    ("torch.autograd", "Function", "apply"),
    ("tensorflow.python.framework.random_seed", "", "get_seed"),
)


#: Operators of TensorFlow's tensors, which may get a number of rows.
OPERATORS = """
    __getitem__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__
    __rtruediv__ __floordiv__ __rfloordiv__ __mod__ __rmod__ __pow__ __rpow__ __lt__
    __le__ __gt__ __ge__ __eq__ __ne__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__
"""


class Tracer(Protocol):
    """A trace of a call.

    Attributes:
        functions: functions in place of those of the backend with their names, such as
            loops.
        draws: functions in place of those of the backend's random numbers.
    """

    functions: Mapping[str, Function]
    draws: Mapping[str, Function]

    def call(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """The symbolic call of a `keras.Operation` or a layer."""

    def call_function(
        self, name: str, original: Function, symbolic: Function, args: Any, kwargs: Any
    ) -> Any:
        """The call of a function of the backend.

        Args:
            name: str, its name.
            original: the function.
            symbolic: that of `keras.ops`.
            args: its arguments.
            kwargs: its keyword arguments.
        """

    def operator(self, name: str, original: Function, tensor: Any, args: Any) -> Any:
        """`original(tensor, *args)`, an operator of the framework's tensors."""

    def add_to_variable(self, original: Function, variable: Any, value: Any) -> Any:
        """`original(variable, value)`, which adds to it or subtracts from it."""

    def is_tensor(self, value: Any) -> bool:
        """Whether a value is a tensor of the trace."""

    def note_problem(self, problem: str) -> None:
        """Notes why the call cannot be traced."""


class _Thread(threading.local):
    tracer: Tracer | None = None
    is_routed = False


_thread = _Thread()
#: Traces of all threads, one after the other.
_lock = threading.RLock()


def current_tracer() -> Any:
    """The trace of this thread; None outside of one."""
    return _thread.tracer


@contextlib.contextmanager
def tracing_paused() -> Iterator[None]:
    """A context in which this thread calls the functions of the backend."""
    tracer, _thread.tracer = _thread.tracer, None
    try:
        yield
    finally:
        _thread.tracer = tracer


@contextlib.contextmanager
def routed_backend() -> Iterator[None]:
    """A context around traces of this thread, which replaces functions once for all.

    To replace them takes longer than the trace of a small layer.
    """
    if _thread.is_routed:
        yield
        return
    with unchanged_backend(), _replaced():
        _thread.is_routed = True
        try:
            yield
        finally:
            _thread.is_routed = False


@contextlib.contextmanager
def tracing(tracer: Tracer) -> Iterator[None]:
    """A context in which this thread's calls of Keras's functions are traced."""
    with routed_backend():
        before, _thread.tracer = _thread.tracer, tracer
        try:
            yield
        finally:
            _thread.tracer = before


def compute_spec(function: Function, *args: Any, **kwargs: Any) -> Any:
    """The shapes and dtypes of the results of a function, by the framework.

    Keras 3.15: `keras.src.backend.compute_output_spec`.
    """
    from keras.src import backend

    with tracing_paused():
        return backend.compute_output_spec(function, *args, **kwargs)


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    rows = _rows()
    for owner, name, value, _ in rows:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, _, original in rows:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


#: How many modules there were, and the rows then.
_found: tuple[int, list[tuple[Any, str, Any, Any]]] = (0, [])


def _rows() -> list[tuple[Any, str, Any, Any]]:
    """As `_replacements`, with the originals; as before, if nothing has changed."""
    global _found
    modules, rows = _found
    if modules != len(sys.modules) or any(
        vars(owner).get(name) is not original for owner, name, _, original in rows
    ):
        rows = [(*row, vars(row[0]).get(row[1])) for row in _replacements()]
        _found = len(sys.modules), rows
    return rows


def _replacements() -> list[tuple[Any, str, Any]]:
    """Owners, the names of their attributes, and the attributes in a trace."""
    found: list[tuple[Any, str, Any]] = []
    for module, name, value in _functions():
        replacement = _replacement(name, value)
        if replacement is not None:
            found.append((module, name, replacement))
    random = _package().random
    found += [(random, name, _drawing(name, vars(random)[name])) for name in _DRAWING]
    return found + _replacements_of_classes()


def _functions() -> Iterator[tuple[Any, str, Any]]:
    """The modules of the backend, the names of their functions, and these."""
    for module in _backend_modules():
        for name, value in list(vars(module).items()):
            if not name.startswith("_") and callable(value):
                yield module, name, value


def routed_functions() -> list[tuple[Any, str, Any]]:
    """The modules, names and functions of the backend that `keras.ops` has too."""
    return [row for row in _functions() if _of_ops(row[1], row[2]) is not None]


@contextlib.contextmanager
def unchanged_backend() -> Iterator[None]:
    """A context in which no thread traces, and none replaces functions of Keras."""
    with _lock, patching.unchanged():
        yield


def _package() -> Any:
    return importlib.import_module(f"keras.src.backend.{keras.backend.backend()}")


@functools.cache
def _backend_modules() -> list[Any]:
    """Keras 3.15: the modules of `keras.src.backend`; 3.16 has some in its `ops`."""
    from keras.src import backend

    packages = [backend, _package()]
    packages += [p.ops for p in packages if hasattr(p, "ops")]
    found = list(packages)
    for package in packages[1:]:
        found += [getattr(package, name, None) for name in _MODULES]
    return list({id(each): each for each in found if each is not None}.values())


#: Functions of control flow, gradients and of values.
_CONTROL = frozenset(
    [
        "associative_scan",
        "cond",
        "custom_gradient",
        "fori_loop",
        "gru",
        "jvp",
        "lstm",
        "map",
        "remat",
        "rnn",
        "scan",
        "switch",
        "vectorize",
        "vectorized_map",
        "while_loop",
    ]
)
_DRAWING = [
    "normal",
    "uniform",
    "truncated_normal",
    "gamma",
    "beta",
    "binomial",
    "categorical",
    "dropout",
    "randint",
    "shuffle",
]


@functools.cache
def _replacement(name: str, original: Any) -> Any:
    if name == "is_tensor":
        return _is_tensor(original)
    if name in _CONTROL:
        return _controlled(name, original)
    if name == "convert_to_numpy":
        return _routed(name, original, _controlled(name, original))
    symbolic = _of_ops(name, original)
    return None if symbolic is None else _routed(name, original, symbolic)


def _of_ops(name: str, original: Any) -> Any:
    """The function of `keras.ops` with the name of one of the backend."""
    found = getattr(keras.ops, name, None) or getattr(keras.ops.image, name, None)
    is_class = isinstance(original, type) or isinstance(found, type)
    return None if is_class else found


def _routed(name: str, original: Function, symbolic: Function) -> Function:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        tracer = _thread.tracer
        if tracer is None:
            return original(*args, **kwargs)
        return tracer.call_function(name, original, symbolic, args, kwargs)

    return call


def _controlled(name: str, original: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        tracer = _thread.tracer
        found = original if tracer is None else tracer.functions[name]
        return found(*args, **kwargs)

    return call


@functools.cache
def _drawing(name: str, original: Function) -> Function:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        tracer = _thread.tracer
        return (original if tracer is None else tracer.draws[name])(*args, **kwargs)

    return call


def _is_tensor(original: Function) -> Function:
    def is_tensor(x: Any) -> bool:
        tracer = _thread.tracer
        return (tracer is not None and tracer.is_tensor(x)) or bool(original(x))

    return is_tensor


def _replacements_of_classes() -> list[tuple[Any, str, Any]]:
    """Operations and their calls leave nothing; functions of frameworks raise."""
    module = sys.modules["keras.src.layers.layer"]
    found: list[tuple[Any, str, Any]] = [
        (kind, "symbolic_call", _symbolic_call(vars(kind)["symbolic_call"]))
        for kind in (keras.Operation, keras.layers.Layer)
    ]
    found.append((module, "Node", _node(vars(module)["Node"])))
    if keras.backend.backend() != "jax":  # Flax may need what theirs adds.
        found.append(
            (keras.Operation, "__new__", _new(vars(keras.Operation)["__new__"]))
        )
    variable = sys.modules["keras.src.backend.common.variables"].Variable
    found += [
        (variable, name, _adding(vars(variable)[name]))
        for name in ("assign_add", "assign_sub")
    ]
    if "tensorflow" in sys.modules:
        tensor = sys.modules["tensorflow"].Tensor
        found += [
            (tensor, name, _operator(name, vars(tensor)[name]))
            for name in OPERATORS.split()
            if name in vars(tensor)
        ]
        tensorflow = sys.modules["tensorflow"]
        found.append((tensorflow, "gather", _gather(tensorflow.gather)))
    for path, kind, name in _GUARDED:
        owner = sys.modules.get(path)
        owner = getattr(owner, kind, None) if kind else owner
        if owner is not None:
            found.append((owner, name, _guarded(vars(owner)[name])))
    return found


def _operator(name: str, original: Function) -> Function:
    def call(self: Any, *args: Any) -> Any:
        tracer = _thread.tracer
        if tracer is None:
            return original(self, *args)
        return tracer.operator(name, original, self, args)

    return call


@functools.cache
def _gather(original: Function) -> Function:
    """`tf.gather` along the last axis, as keras-hub's DeBERTa calls it."""

    @functools.wraps(original)
    def gather(params: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = _thread.tracer
        if tracer is not None and tracer.is_tensor(params) and not args:
            ranks = {len(params.shape), len(indices.shape)}
            if ranks == {kwargs.get("batch_dims", 0) + 1} and len(kwargs) == 1:
                return keras.ops.take_along_axis(params, indices, axis=-1)
        return original(params, indices, *args, **kwargs)

    return gather


def _symbolic_call(original: Function) -> Function:
    def symbolic_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracer = _thread.tracer
        if tracer is None:
            return original(self, *args, **kwargs)
        return tracer.call(self, args, kwargs)

    return symbolic_call


def _adding(original: Function) -> Function:
    def add(self: Any, value: Any) -> Any:
        tracer = _thread.tracer
        if tracer is None:
            return original(self, value)
        return tracer.add_to_variable(inspect.unwrap(original), self, value)

    return add


def _new(original: Any) -> Any:
    """Operations of Keras without configurations, which take a tenth of a proof."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if _thread.tracer is None or not cls.__module__.startswith("keras.src.ops."):
            return original(cls, *args, **kwargs)
        return object.__new__(cls)

    return staticmethod(new)


def _node(original: Function) -> Function:
    def node(*args: Any, **kwargs: Any) -> Any:
        return None if _thread.tracer else original(*args, **kwargs)

    return node


def _guarded(original: Any) -> Any:
    if isinstance(original, classmethod):
        return classmethod(_guarded(original.__func__))

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        tracer = _thread.tracer
        if tracer is not None:
            problem = f"calls {original.__name__!r} of its framework"
            tracer.note_problem(problem)
            raise RuntimeError(problem)
        return original(*args, **kwargs)

    return call
