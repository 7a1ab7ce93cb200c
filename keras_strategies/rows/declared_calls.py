"""Calls of declared layers: on a few rows at once and in parts, and their shapes."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops, tree

from keras_strategies.keras_compat.models.layers import get_mask, set_mask
from keras_strategies.keras_compat.symbolic_backend import tracing_paused
from keras_strategies.keras_compat.variables.generator_seeds import (
    is_seed_state,
    seed_generators,
)
from keras_strategies.rows.layer_calls import LayerCall, argument_leaves
from keras_strategies.rows.placed import as_array
from keras_strategies.rows.python_state import PythonState
from keras_strategies.rows.row_tensors import NotTraced, RowTensor, error_text, symbolic

#: The rows of a comparison, and of its parts.
_ROWS = 6
_ALL = (slice(0, _ROWS),)
_PARTS = (slice(0, 2), slice(2, _ROWS))
#: Of axes whose length is unknown.
_LENGTH = 8
_TOLERANCE, _OF_HALVES = 1e-3, 2e-2


class CallResults(NamedTuple):
    """What a call gives.

    Args:
        outputs: structure of its outputs.
        losses: the losses that it adds.
        updates: the values that it assigns, by `id(variable)`.
    """

    outputs: Any
    losses: list[Any]
    updates: dict[int, Any]


#: By the layer, and by the kinds of arguments: its problem, or symbolic results.
_traced: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


class _Differs(Exception):
    """Why a declared layer is not split."""


def problem_of_declared(call: LayerCall, with_rows: Sequence[bool]) -> str | None:
    """Why a declared layer is not split; None if its rows agree.

    Args:
        call: the call.
        with_rows: for each leaf, whether replicas get slices of its rows.
    """
    state = PythonState(call.layer, call.leaves)
    if state.problem is not None:
        return state.problem
    problem, _ = _compared(call, with_rows)
    return problem or state.change()


def results_of_declared(
    layer: Any, arguments: tuple[Any, Any], rows: int, key: Any
) -> CallResults:
    """The symbolic results of a declared layer that another one calls.

    Args:
        layer: the layer.
        arguments: the pair of arguments and keyword arguments, tensors of a trace.
        rows: int, the rows of the trace.
        key: what results depend on.

    Raises:
        NotTraced: if the layer is not split.
    """
    known = _traced.setdefault(layer, {})
    if key not in known:
        leaves = argument_leaves(*arguments)
        with_rows = [are_rows(leaf, rows) for leaf in leaves]
        # Regularizers of outputs are called by the trace.
        call = LayerCall(layer, layer.call, arguments, leaves, rows)
        known[key] = _compared(call, with_rows)
    results: CallResults
    problem, results = known[key]
    if problem is not None:
        raise NotTraced(
            f"calls layer {layer.name!r} ({type(layer).__name__}): {problem}"
        )
    return results


def are_rows(leaf: Any, rows: int) -> bool:
    """Whether a tensor of a trace has the rows as its first axis."""
    return isinstance(leaf, RowTensor) and leaf.lengths[:1] == (rows,)


def _compared(
    call: LayerCall, with_rows: Sequence[bool]
) -> tuple[str | None, CallResults]:
    """Why rows do not agree, and the results of all rows."""
    nothing = CallResults([], [], {})
    try:
        with tracing_paused(), _unchanged_buffers(call.layer):
            results = _compare(call, with_rows)
            return None, CallResults(*tree.map_structure(symbolic, tuple(results)))
    except _Differs as error:
        return f"it is declared with `ks.row_wise`, but {error}", nothing
    except Exception as error:  # Of the user's code, or of a framework.
        return f"its call on {_ROWS} rows fails ({error_text(error)})", nothing


@contextlib.contextmanager
def _unchanged_buffers(layer: Any) -> Iterator[None]:
    """A context after which buffers of torch modules in a layer are as before."""
    buffers = layer.buffers() if hasattr(layer, "buffers") else ()
    before = [(buffer, buffer.clone()) for buffer in buffers]
    try:
        yield
    finally:
        changed = [pair for pair in before if not pair[0].equal(pair[1])]
        for buffer, value in changed:
            buffer.copy_(value)
    if changed:
        raise _Differs("it changes buffers of a torch module")


def _compare(call: LayerCall, with_rows: Sequence[bool]) -> CallResults:
    leaves = list(map(_value, call.leaves, with_rows))
    results = _called(call, leaves)
    every = _arrays(results)
    if not any(with_rows):
        return results
    difference = _difference(every, [_arrays(_called(call, leaves))], _ALL)
    if difference:
        raise _Differs(
            f"two calls with the same arguments differ: {difference}. What it draws "
            "without a `keras.random.SeedGenerator` cannot be split"
        )
    options: dict[str, Any] = {}
    if seed_generators(call.layer):
        if "training" not in inspect.signature(call.layer.call).parameters:
            return results
        options = {"training": False}
        every = _arrays(_called(call, leaves, **options))
    parts = []
    for rows in _PARTS:
        own = [_part(*each, rows) for each in zip(leaves, with_rows, strict=True)]
        parts.append(_arrays(_called(call, own, **options)))
    difference = _difference(every, parts, _PARTS)
    if difference:
        raise _Differs(f"its rows depend on one another: {difference}")
    return results


def _value(leaf: Any, has_rows: bool) -> Any:
    """A leaf with few rows: its own ones, or random ones where it has no values."""
    is_parts = hasattr(leaf, "parts")
    has_values = not (is_parts or isinstance(leaf, keras.KerasTensor))
    if isinstance(leaf, keras.Variable) or (has_values and not ops.is_tensor(leaf)):
        return leaf
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    shape = [n or _LENGTH for n in getattr(leaf, "lengths", leaf.shape)]
    array: Any = np.random.default_rng(0).normal(size=[_ROWS, *shape[has_rows:]])
    if "float" not in dtype:
        array = array > 0
    array = array if has_rows else array[0]
    if has_values:
        # Each framework raises another error for a tensor of a program.
        with contextlib.suppress(Exception):
            array = ops.convert_to_numpy(leaf)
    if has_rows:
        array = np.resize(array, (_ROWS, *array.shape[1:]))
    value = ops.convert_to_tensor(array, dtype)
    mask = None if is_parts else get_mask(leaf)
    if mask is not None:
        set_mask(value, _value(mask, has_rows))
    return value


def _part(value: Any, has_rows: bool, rows: slice) -> Any:
    if not has_rows:
        return value
    found = value[rows]
    mask = get_mask(value)
    if mask is not None:
        set_mask(found, mask[rows])
    return found


def _called(call: LayerCall, leaves: Sequence[Any], **options: Any) -> CallResults:
    args, kwargs = call.arguments(leaves)
    scope = keras.StatelessScope(collect_losses=True)
    with scope:
        outputs = call.call(*args, **{**kwargs, **options})
        seeds = {id(v) for v in call.layer.variables if is_seed_state(v)}
        updates = {k: v for k, v in scope.state_mapping.items() if k not in seeds}
        return CallResults(outputs, list(scope.losses), updates)


def _arrays(results: CallResults) -> dict[str, Any]:
    """The outputs, losses and updates by what they are called."""
    outputs = [x for x in tree.flatten(results.outputs) if x is not None]
    kinds: dict[str, Any] = {"output": outputs, "loss": results.losses}
    kinds["the value of variable"] = results.updates.values()
    return {
        f"{kind} {i}": _numbers(value)
        for kind, values in kinds.items()
        for i, value in enumerate(values)
    }


def _numbers(value: Any) -> Any:
    if not ops.is_tensor(value):
        return np.asarray(value)
    is_half = keras.backend.standardize_dtype(value.dtype) in ("float16", "bfloat16")
    return as_array(value).astype("float16") if is_half else as_array(value)


def _difference(every: Any, parts: Sequence[Any], slices: Sequence[slice]) -> str:
    """How results of all rows differ from those of parts; empty if they agree."""
    if any(part.keys() != every.keys() for part in parts):
        return "it has other results for other numbers of rows"
    sizes = [rows.stop - rows.start for rows in slices]
    for name, expected in every.items():
        found, says = [part[name] for part in parts], "is no mean over rows, and "
        if name.startswith("output"):
            lengths = [x.shape[0] if x.ndim else "no" for x in (expected, *found)]
            if lengths != [_ROWS, *sizes]:
                return f"{name} has {lengths[0]} rows for {_ROWS} rows of the arguments"
            found, says = [np.concatenate(found)], ""
        elif np.issubdtype(expected.dtype, np.floating):
            pairs = zip(found, sizes, strict=True)
            found = [sum(np.float64(x) * size / _ROWS for x, size in pairs)]
        gap = next(filter(None, (_gap(expected, each) for each in found)), "")
        if gap:
            return f"{name} {says}{gap}"
    return ""


def _gap(expected: Any, found: Any) -> str:
    if expected.shape != found.shape:
        return f"has shape {found.shape} in parts and {expected.shape} at once"
    if np.array_equal(expected, found):
        return ""
    if not np.issubdtype(expected.dtype, np.number):
        return "differs"
    tolerance = _OF_HALVES if expected.dtype == np.float16 else _TOLERANCE
    expected, found = expected + np.float64(0), found + np.float64(0)
    largest = np.abs(expected).max(where=np.isfinite(expected), initial=0)
    if np.allclose(expected, found, 0, tolerance * largest, equal_nan=True):
        return ""
    with np.errstate(invalid="ignore"):
        gap = np.abs(expected - found).max()
    return f"differs by up to {gap:.3g}, where the largest value is {largest:.3g}"
