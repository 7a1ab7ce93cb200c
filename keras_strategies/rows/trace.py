"""The operations of one call with a number of rows, recorded as Keras makes them."""

from __future__ import annotations

import contextlib
import math
import os
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
from keras import ops, tree

from keras_strategies.keras_compat.models.layers import is_rematerialized
from keras_strategies.keras_compat.models.row_wise_layers import is_row_wise
from keras_strategies.keras_compat.state_scope import StatePolicy
from keras_strategies.keras_compat.structures import leaves_of
from keras_strategies.keras_compat.symbolic_backend import compute_spec
from keras_strategies.keras_compat.variables.generator_seeds import (
    is_seed_state,
    seed_generators,
)
from keras_strategies.keras_compat.variables.values import raw_value, stored_dtype
from keras_strategies.rows.code_names import Lines
from keras_strategies.rows.declarations import is_declared
from keras_strategies.rows.declared_calls import are_rows, results_of_declared
from keras_strategies.rows.layer_calls import leaf_key
from keras_strategies.rows.row_placements import FUNCTIONS_OF_SUMS, SUMS, ProvedEvent
from keras_strategies.rows.row_tensors import (
    NotTraced,
    RowCount,
    RowTensor,
    is_array,
    refuse_count,
    shape_of,
    symbolic,
    tensors_in,
)
from keras_strategies.rows.variances import as_means
from keras_strategies.user_warnings import user_line

#: Operations that call others of Keras.
_CALLING = """
    AssociativeScan Cond ForiLoop Function JVP Map Scan Switch VectorizedMap WhileLoop
"""
#: Operations, and layers of Keras, whose results have memory of their own.
_WITH_MEMORY = """
    Add Subtract Multiply Divide TrueDivide Power Matmul Einsum Where Concatenate Exp
    Square Sqrt Rsqrt Sum Mean Conv ConvTranspose DepthwiseConv Dense EinsumDense
    Embedding LayerNormalization
"""
#: Functions that make a tensor of a shape.
_MADE_OF_SHAPE = frozenset(["zeros", "ones", "empty", "full"])


@dataclass(frozen=True)
class Body:
    """The operations of a function that another operation calls."""

    inputs: list[Any]
    nodes: list[Node]
    outputs: Any


@dataclass(frozen=True)
class Node:
    """One operation of a trace.

    Args:
        name: str, the kind of the operation.
        operation: the `keras.Operation` or layer; None for others.
        args: its arguments.
        kwargs: its keyword arguments.
        outputs: structure of its results.
        place: str, the layer and the line of the user's that make it.
        bodies: functions that it calls.
        number: int, that of a call of a layer that is one operation.
        is_repeated: bool, whether the backward pass computes it again.
    """

    name: str
    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any
    place: str = ""
    bodies: tuple[Body, ...] = ()
    number: int | None = None
    is_repeated: bool = False


class TracedState(StatePolicy):
    """Variables are symbolic tensors of a trace; assignments are noted.

    Attributes:
        variables: the variables that are read or assigned, by their `id`.
        initial: their tensors.
        values: their tensors after the call.
    """

    def __init__(self, trace: Trace):
        self._trace: Callable[[], Any] = weakref.ref(trace)
        self._only_adds = trace.only_adds
        self.is_adding = False
        self.variables: dict[int, Any] = {}
        self.initial: dict[int, Any] = {}
        self.values: dict[int, Any] = {}

    def read(self, variable: Any) -> Any:
        if self._only_adds and not self.is_adding:
            raise NotTraced(f"reads or assigns variable {variable.path!r}")
        key = id(variable)
        if key not in self.values:
            if raw_value(variable) is None:
                raise NotTraced("makes a variable in each call")
            self.variables[key] = variable
            shape, dtype = variable.shape, stored_dtype(variable)
            value = self._trace().tensor(shape, dtype)
            self.initial[key] = self.values[key] = value
        return self.values[key]

    def assign(self, variable: Any, value: Any) -> None:
        self.read(variable)
        self._trace().check_once("assigns a variable")
        self.values[id(variable)] = value


@dataclass(eq=False)
class Trace:
    """The operations of one call with a number of rows.

    Args:
        rows: int, the number of rows.
        is_any: bool, whether it stands for any number of rows.
        followed: the numbers of calls of known layers whose code is traced.
        only_adds: bool, see `LayerCall`.
        functions: see `Tracer`.
        draws: see `Tracer`.
    """

    rows: int
    is_any: bool
    followed: frozenset[int]
    only_adds: bool
    functions: Any
    draws: Any
    #: The tensors with rows, the results, and the lines of the user's that ran.
    inputs: list[Any] = field(default_factory=list)
    outputs: Any = None
    lines: Lines = field(default_factory=set)
    nodes: list[Node] = field(default_factory=list)
    made: list[weakref.ref[Any]] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)
    calls_declared: bool = False
    depth: int = 0
    #: How many functions around are computed again in the backward pass.
    repeated: int = 0
    #: The tensors that are drawn, and the functions that draw them.
    drawn: list[tuple[str, Any]] = field(default_factory=list)
    draws_without_seed: bool = False
    #: Operations of `SUMS`, and calls of layers, outside of loops and branches. An
    #: operation of constants has no node.
    events: list[tuple[ProvedEvent, Node | None]] = field(default_factory=list)
    #: A context around calls with values, which are not those of a replica.
    outside: Callable[[], contextlib.AbstractContextManager[Any]] = nullcontext
    problem: str | None = None
    #: Whether a function of the backend computes constants, by others.
    _is_inside: bool = False
    _known_calls: int = 0
    #: The innermost one that is called.
    _layer: Any = None
    #: Tensors of lengths, by their ids, of which Keras's losses take the product.
    _lengths: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.state = TracedState(self)

    # Tensors.

    def tensor(self, shape: Any, dtype: Any) -> RowTensor:
        any_rows = self.rows if self.is_any else None
        found = RowTensor(shape, dtype, len(self.made), any_rows)
        self.made.append(weakref.ref(found))
        return found

    def like(self, structure: Any) -> Any:
        """Tensors of the trace with the shapes and dtypes of a structure."""
        if isinstance(structure, keras.KerasTensor):
            return self.tensor(shape_of(structure), structure.dtype)
        nested = isinstance(structure, (list, tuple, dict))
        return tree.map_structure(self.like, structure) if nested else structure

    def values(self, structure: Any) -> Any:
        """A structure with the current values in place of variables."""
        if not _has(structure, keras.Variable):
            return structure
        return tree.map_structure(
            lambda x: x.value if isinstance(x, keras.Variable) else x, structure
        )

    # The tracer of `symbolic_backend`.

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, RowTensor)

    def has_tensors(self, structure: Any) -> bool:
        return _has(structure, RowTensor)

    def check_once(self, what: str) -> None:
        """Raises an error for what happens once, where code is repeated."""
        if self.repeated:
            raise NotTraced(f"{what} in what is computed again in the backward pass")
        if self.depth:
            raise NotTraced(f"{what} in the body of a loop or branch")

    def repeating(self) -> contextlib.AbstractContextManager[None]:
        """Context of code that is computed again in the backward pass."""
        return _assigned(self, repeated=self.repeated + 1)

    def note_problem(self, problem: str) -> None:
        self.problem = self.problem or problem

    def call(self, operation: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = self.values(args), self.values(kwargs)
        if isinstance(operation, keras.layers.Layer):
            again = self.repeating if is_rematerialized(operation) else nullcontext
            with _assigned(self, _layer=operation), again():
                return self._call_layer(operation, args, kwargs)
        name = type(operation).__name__
        composed = as_means(name.lower(), args[0]) if args else None
        if composed is not None:
            return composed(args[0], operation.axis, operation.keepdims)
        if name == "Outer":
            return ops.reshape(args[0], (-1, 1)) * ops.reshape(args[1], (1, -1))
        is_own = not type(operation).__module__.startswith("keras.src.")
        if is_own or name in _CALLING.split():
            return operation.call(*args, **kwargs)
        _, lengths = self._lengths.get(id(args[0]) if args else 0, (None, None))
        if name == "Prod" and lengths and operation.axis is None:
            return self._constant(RowCount(math.prod(map(int, lengths))))
        spec = _spec(operation, args, kwargs)
        return self.record(Node(name, operation, args, kwargs, spec))

    def call_function(
        self, name: str, original: Any, symbolic: Any, args: Any, kwargs: Any
    ) -> Any:
        args, kwargs = self.values(args), self.values(kwargs)
        if not _has((args, kwargs), RowTensor):
            if not self.is_any or not _has((args, kwargs), RowCount):
                return self._of_constants(name, original, args, kwargs)
            if name in _MADE_OF_SHAPE:
                return self._made_of_shape(original, *args, **kwargs)
            if name == "arange":
                return self._row_numbers(*args, **kwargs)
            lengths = args[0] if args else None
            args, kwargs = self._lifted((args, kwargs))
            found = symbolic(*args, **kwargs)
            if name == "convert_to_tensor" and isinstance(lengths, tuple):
                self._lengths[id(found)] = found, lengths
            return found
        return symbolic(*args, **kwargs)

    def _of_constants(self, name: str, original: Any, args: Any, kwargs: Any) -> Any:
        if name in FUNCTIONS_OF_SUMS and not (self.depth or self._is_inside):
            self.events.append((ProvedEvent(FUNCTIONS_OF_SUMS[name]), None))
        with _assigned(self, _is_inside=True):
            return original(*args, **kwargs)

    def changed_in_place(self, before: RowTensor, after: RowTensor) -> Any:
        """The tensor that an operator with assignment has changed to `after`."""
        given = (before, after, before.is_inner)
        found = self.record(Node("in_place", None, given, {}, after))
        found.is_inner = before.is_inner
        return found

    def operator(self, name: str, original: Any, tensor: Any, args: Any) -> Any:
        if self.is_any and _has(args, RowCount):
            refuse_count()
        if isinstance(args[0] if args else None, RowTensor) and name != "__getitem__":
            # TensorFlow raises an error where others leave it to the second operand.
            return getattr(self._constant(tensor), name)(*args)
        return original(tensor, *args)

    def add_to_variable(self, original: Any, variable: Any, value: Any) -> Any:
        with _assigned(self.state, is_adding=True):
            return original(variable, value)

    # Programs for any number of rows: what depends on it is no constant.

    def _made_of_shape(
        self, original: Any, shape: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if _has((args, kwargs), RowCount):
            raise NotTraced("fills a tensor with the number of rows")
        entry = original((), *args, **kwargs)
        shape = (shape,) if isinstance(shape, int) else shape
        dtype = keras.backend.standardize_dtype(entry.dtype)
        spec = keras.KerasTensor(tuple(map(int, shape)), dtype)
        return self.record(Node("filled", None, (entry,), {}, spec))

    def _row_numbers(
        self, start: Any, stop: Any = None, step: Any = None, dtype: Any = None
    ) -> Any:
        """0, 1, ..., n - 1."""
        first, count = (0, start) if stop is None else (start, stop)
        if first != 0 or step not in (None, 1):
            refuse_count()
        spec = keras.KerasTensor((int(count),), dtype or "int32")
        return self.record(Node("row_numbers", None, (), {}, spec))

    def _lifted(self, structure: Any) -> Any:
        """Arguments with tensors of the trace in place of arrays, or of counts."""
        has_arrays = any(map(is_array, leaves_of(structure)))

        def lifted(leaf: Any) -> Any:
            is_lifted = is_array(leaf) if has_arrays else isinstance(leaf, RowCount)
            return self._constant(leaf) if is_lifted else leaf

        return tree.map_structure(lifted, structure)

    def _constant(self, leaf: Any) -> Any:
        """A tensor of the trace for an array or a number of rows."""
        if isinstance(leaf, RowCount):
            leaf = np.asarray(int(leaf), "int32")
        return self.record(Node("constant", None, (leaf,), {}, symbolic(leaf)))

    # Layers.

    def _call_layer(self, layer: Any, args: Any, kwargs: Any) -> Any:
        if is_declared(layer) and not seed_generators(layer):
            self._note_layer(layer, is_one=True)
            return self.declared_call(layer, args, kwargs)
        module = type(layer).__module__
        names = vars(sys.modules[module]) if module.startswith("keras.") else {}
        if any(each is random for each in names.values()):
            raise NotTraced(f"draws random numbers of Python in {layer.name!r}")
        ranks = [len(tensor.lengths) for tensor in tensors_in((args, kwargs))]
        if _has_own_spec(layer) and all(ranks) and is_row_wise(layer, ranks):
            number = self._known_calls
            self._known_calls += 1
            if number not in self.followed and not seed_generators(layer):
                outputs = layer.compute_output_spec(*args, **kwargs)
                # Some layers say None for the sizes of the batch.
                if all(x is None or None not in x.shape for x in leaves_of(outputs)):
                    self._note_layer(layer, is_one=True)
                    return self._known_call(layer, args, kwargs, number, outputs)
        self._note_layer(layer)
        if getattr(layer, "quantization_mode", None) is not None:
            return layer.quantized_call(*args, **kwargs)
        return layer.call(*args, **kwargs)

    def _note_layer(self, layer: Any, is_one: bool = False) -> None:
        if not self.depth:
            self.events.append((ProvedEvent("", id(layer), is_one), None))

    def declared_call(self, layer: Any, args: Any, kwargs: Any) -> Any:
        """A declared layer or function as one operation."""
        self.calls_declared = True
        leaves = leaves_of((args, kwargs))
        with self.outside():
            kinds = tuple(leaf_key(x, are_rows(x, self.rows)) for x in leaves)
            results = results_of_declared(layer, (args, kwargs), self.rows, kinds)
        has_rows = any(are_rows(x, self.rows) for x in leaves)

        def with_all_rows(x: Any) -> Any:
            if not (has_rows and isinstance(x, keras.KerasTensor)):
                return x
            return keras.KerasTensor((self.rows, *x.shape[1:]), x.dtype)

        outputs = tree.map_structure(with_all_rows, results.outputs)
        spec = (outputs, *results[1:])
        node = Node("row_wise", None, (args, kwargs), {}, spec)
        made, losses, updates = self.record(node)
        for loss in losses:
            layer.add_loss(loss)
        variables = {id(variable): variable for variable in layer.variables}
        if not updates.keys() <= variables.keys():
            raise NotTraced(f"assigns variables in the declared {layer.name!r}")
        for key, value in updates.items():
            self.state.assign(variables[key], value)
        return made

    def _known_call(
        self, layer: Any, args: Any, kwargs: Any, number: int, outputs: Any
    ) -> Any:
        """A layer of Keras as one operation."""
        assigned = layer.non_trainable_variables
        if isinstance(layer, keras.layers.SpectralNormalization):
            assigned = [layer.kernel, layer.vector_u]
        states = [v for v in assigned if not is_seed_state(v)]
        after = [keras.KerasTensor(v.shape, v.dtype) for v in states]
        given = (type(layer).__name__, layer, args, kwargs, (outputs, after))
        made, values = self.record(Node(*given, number=number))
        for variable, value in zip(states, values, strict=True):
            self.state.assign(variable, value)
        return made

    # Operations.

    def record(self, node: Node) -> Any:
        """Adds an operation, and returns its results.

        Args:
            node: the operation, with symbolic tensors like its results and without a
                place.
        """
        made = self.like(node.outputs)
        if keras.backend.backend() == "torch":
            _note_memory(node.name, (node.args, node.kwargs), made)
        repeated = self.repeated > 0
        node = replace(node, outputs=made, place=self._place(), is_repeated=repeated)
        self.nodes.append(node)
        if node.name in SUMS and node.number is None and not self.depth:
            self.events.append((ProvedEvent(node.name), node))
        return made

    def body(self, function: Callable[..., Any], *specs: Any) -> Body:
        """The operations of a function, called with tensors as given."""
        inputs = [self.like(spec_of(spec)) for spec in specs]
        with _assigned(self, nodes=[], depth=self.depth + 1):
            (outputs,) = self.values((function(*inputs),))
            return Body(inputs, self.nodes, outputs)

    def _place(self) -> str:
        """The innermost layer, and the innermost line of the user's."""
        layer, line = self._layer, os.path.basename(user_line())
        if layer is None:
            return line
        return f"in layer {layer.name!r} ({type(layer).__name__}), {line}"

    def close(self) -> None:
        """Lets go of all tensors."""
        vars(self.state).clear()
        vars(self).clear()


@contextlib.contextmanager
def _assigned(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which attributes have other values."""
    before = {name: getattr(owner, name) for name in values}
    vars(owner).update(values)
    try:
        yield
    finally:
        vars(owner).update(before)


def _note_memory(name: str, arguments: Any, made: Any) -> None:
    """Notes which results do not have the memory of an argument of the call."""
    given = tensors_in(arguments)
    is_fresh = name in _WITH_MEMORY.split() and not (
        name == "Einsum" and len(given) == 1
    )
    is_inner = is_fresh or (bool(given) and all(x.is_inner for x in given))
    for tensor in tensors_in([made]):
        tensor.is_inner = is_inner


def _spec(operation: Any, args: Any, kwargs: Any) -> Any:
    """The shapes and dtypes of the results of an operation."""
    if type(operation).__name__ == "GetItem":
        return _spec_of_item(*args, **kwargs)
    try:
        return operation.compute_output_spec(*args, **kwargs)
    except (AttributeError, IndexError, TypeError, ValueError):
        pass  # Some of Keras expect tensors in place of numbers, or have a fault.

    def plain(x: Any) -> Any:
        return keras.KerasTensor(x.lengths, x.dtype) if isinstance(x, RowTensor) else x

    return compute_spec(operation.call, *tree.map_structure(plain, args), **kwargs)


def _spec_of_item(x: Any, key: Any) -> Any:
    """That of `x[key]`, by NumPy: Keras's has neither tensors nor a single slice."""
    parts = list(key) if isinstance(key, (tuple, list)) else [key]
    if any("bool" in str(getattr(part, "dtype", "")) for part in parts):
        raise NotTraced("takes as many entries as a mask says")
    arrays = [
        np.zeros(shape_of(part), "int8") if hasattr(part, "shape") else part
        for part in parts
    ]
    item = np.broadcast_to(np.int8(0), x.lengths)[tuple(arrays)]
    return keras.KerasTensor(item.shape, x.dtype)


def _has(structure: Any, kind: type) -> bool:
    for x in structure.values() if isinstance(structure, dict) else structure:
        if isinstance(x, kind):
            return True
        if isinstance(x, slice):
            x = (x.start, x.stop, x.step)
        if isinstance(x, (list, tuple, dict)) and _has(x, kind):
            return True
    return False


def _has_own_spec(layer: Any) -> bool:
    """Whether a layer says the shapes of its outputs without a call."""
    kind, base = type(layer), keras.layers.Layer
    return not isinstance(layer, keras.Model) and (
        kind.compute_output_shape is not base.compute_output_shape
        or kind.compute_output_spec is not base.compute_output_spec
    )


def spec_of(structure: Any) -> Any:
    """Symbolic tensors for numbers and arrays as well."""

    def spec(x: Any) -> Any:
        is_spec = x is None or isinstance(x, keras.KerasTensor)
        return x if is_spec else symbolic(ops.convert_to_tensor(x))

    return tree.map_structure(spec, structure)
