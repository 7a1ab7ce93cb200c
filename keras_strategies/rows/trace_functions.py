"""Loops, branches, gradients and random numbers of a trace.

Functions in place of those of Keras's backend with the same names. Bodies of loops and
branches are traced where they are called, so that closures work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import keras
import numpy as np
from keras import ops, tree

from keras_strategies.keras_compat.symbolic_backend import current_tracer
from keras_strategies.rows.row_tensors import NotTraced, is_number, shape_of
from keras_strategies.rows.trace import Body, Node, Trace, spec_of


def _active() -> Trace:
    tracer = current_tracer()
    if tracer is None:
        raise NotTraced("calls a function outside of its trace")
    assert isinstance(tracer, Trace)
    return tracer


def _reshaped(structure: Any, of_shape: Callable[..., tuple[int, ...]]) -> Any:
    """Symbolic tensors of a function of their shapes."""

    def spec(x: Any) -> Any:
        return x if x is None else keras.KerasTensor(of_shape(*shape_of(x)), x.dtype)

    return tree.map_structure(spec, spec_of(structure))


def _without(structure: Any) -> Any:
    """Symbolic tensors without the first axis."""
    return _reshaped(structure, lambda first, *rest: rest)


def _with(length: int, structure: Any) -> Any:
    """Symbolic tensors with a further first axis."""
    return _reshaped(structure, lambda *shape: (length, *shape))


def _length(structure: Any) -> int:
    return shape_of(tree.flatten(structure)[0])[0]


def _flow(
    name: str, given: tuple[Any, ...], outputs: Any, *bodies: Body, **static: Any
) -> Any:
    return _active().record(
        Node(name, None, given, static, spec_of(outputs), bodies=bodies)
    )


# Control flow.


def _scan(f: Any, init: Any, xs: Any = None, length: Any = None, **options: Any) -> Any:
    trace = _active()
    init, xs = trace.values((init, xs))
    steps = _length(xs) if xs is not None else int(length)
    body = trace.body(f, init, _without(xs))
    carry, y = body.outputs
    return _flow("scan", (init, xs), (carry, _with(steps, y)), body, length=length)


def _while_loop(
    cond: Any, body: Any, loop_vars: Any, maximum_iterations: Any = None
) -> Any:
    trace = _active()
    several = isinstance(loop_vars, (list, tuple))
    start = trace.values(tuple(loop_vars) if several else (loop_vars,))
    test = trace.body(cond, *start)
    step = trace.body(body, *start)
    found = _flow("while", (start,), start, test, step, most=maximum_iterations)
    return found if several else found[0]


def _fori_loop(lower: Any, upper: Any, body_fun: Any, init_val: Any) -> Any:
    def step(carry: Any, number: Any) -> Any:
        return body_fun(number, carry), None

    return _scan(step, init_val, np.arange(lower, upper, dtype="int32"))[0]


def _cond(pred: Any, true_fn: Any, false_fn: Any) -> Any:
    index = int(not pred) if is_number(pred) else pred
    return _switch(index, (true_fn, false_fn))


def _switch(index: Any, branches: Any, *operands: Any) -> Any:
    if isinstance(index, (int, np.integer)):
        return branches[min(max(int(index), 0), len(branches) - 1)](*operands)
    trace = _active()
    (index,) = trace.values((index,))
    bodies = [trace.body(lambda f=f: f(*operands)) for f in branches]
    return _flow("switch", (index,), bodies[0].outputs, *bodies)


def _vectorized_map(function: Any, elements: Any) -> Any:
    trace = _active()
    (elements,) = trace.values((elements,))
    body = trace.body(function, _without(elements))
    outputs = _with(_length(elements), body.outputs)
    return _flow("map", (elements,), outputs, body)


def _vectorize(pyfunc: Any, *, excluded: Any = None, signature: Any = None) -> Any:
    if excluded or signature:
        raise NotTraced("vectorizes with a signature")

    def call(x: Any) -> Any:
        function = pyfunc
        for _ in x.shape:
            function = functools.partial(_vectorized_map, function)
        return function(x)

    return call


def _associative_scan(f: Any, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    trace = _active()
    (elems,) = trace.values((elems,))
    body = trace.body(f, elems, elems)
    return _flow("associative_scan", (elems,), elems, body, axis=axis)


def _rnn(
    step_function: Any,
    inputs: Any,
    initial_states: Any,
    mask: Any = None,
    constants: Any = None,
    time_major: bool = False,
    return_all_outputs: bool = True,
    **options: Any,
) -> Any:
    """A loop over axis 1, the steps in time of all rows."""
    if time_major:
        raise NotTraced("has a loop over time with rows along the second axis")

    def step(states: Any, given: Any) -> Any:
        x, mask = given
        output, after = step_function(x, (*states, *(constants or ())))
        if mask is not None:
            output, after = tree.map_structure(_depending_on(mask), (output, after))
        return list(after)[: len(states)], output

    every = _swapped((inputs, mask))
    after, every = _scan(step, list(initial_states), every)
    every = _swapped(every)
    last = tree.map_structure(lambda x: x[:, -1], every)
    if not return_all_outputs:
        every = tree.map_structure(lambda x: x[:, -1:], every)
    return last, every, after


def _swapped(structure: Any) -> Any:
    return tree.map_structure(
        lambda x: x if x is None else ops.swapaxes(x, 0, 1), structure
    )


def _depending_on(mask: Any) -> Callable[[Any], Any]:
    """Selects entries by the mask of one step in time: their values do not matter."""

    def masked(x: Any) -> Any:
        return ops.where(ops.reshape(mask, (-1, *[1] * (len(x.shape) - 1))), x, x)

    return masked


def _not_on_this_device(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError  # Keras has a loop over time then.


def _remat(function: Any) -> Any:
    """A function that is computed again in the backward pass."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _active().repeating():
            return function(*args, **kwargs)

    return call


# Gradients.


def _custom_gradient(function: Any) -> Any:
    """A function with a gradient of the user's, whose operations are traced as well."""

    def call(*args: Any, **kwargs: Any) -> Any:
        trace = _active()
        args = trace.values(args)
        outputs, gradient = function(*args, **kwargs)
        upstream = spec_of(outputs)

        def backward(*given: Any) -> Any:
            if keras.backend.backend() == "torch":
                return gradient(*args, upstream=given[0])
            return gradient(*given)

        flat = upstream if isinstance(upstream, (list, tuple)) else [upstream]
        body = trace.body(backward, *flat)
        return _flow("gradient", (args, outputs), outputs, body)

    return call


def _jvp(fun: Any, primals: Any, tangents: Any, has_aux: bool = False) -> Any:
    trace = _active()
    if has_aux:
        raise NotTraced("has auxiliary results")
    primals, tangents = trace.values((primals, tangents))
    body = trace.body(fun, *primals)
    outputs = (body.outputs, body.outputs)
    return _flow("jvp", (primals, tangents), outputs, body)


def _no_numpy(*args: Any, **kwargs: Any) -> NoReturn:
    raise NotTraced("reads values of a tensor")


#: In place of functions of the backend with these names.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        function.__name__.removeprefix("_"): function
        for function in (
            *(_associative_scan, _cond, _custom_gradient, _fori_loop, _jvp, _remat),
            *(_rnn, _scan, _switch, _vectorize, _vectorized_map, _while_loop),
        )
    },
    "convert_to_numpy": _no_numpy,
    "gru": _not_on_this_device,
    "lstm": _not_on_this_device,
    "map": _vectorized_map,
}


# Random numbers: one draw for each call of a function of `keras.random`.


def _draw(name: str, seed: Any, shape: Any, dtype: Any, *arguments: Any) -> Any:
    trace = _active()
    trace.draws_without_seed |= seed is None
    trace.check_once("draws random numbers")
    given = trace.values(arguments)
    spec = keras.KerasTensor(tuple(map(int, shape)), dtype or keras.config.floatx())
    made = trace.record(Node("draw", None, given, {}, spec))
    # The name tells which have a parameter for each entry.
    has_parameters = any(len(shape_of(each)) == len(shape) for each in given)
    trace.drawn.append((name if has_parameters else "", made))
    return made


def _filled(name: str, default: Any = None) -> Callable[..., Any]:
    def draw(
        shape: Any, *values: Any, dtype: Any = default, seed: Any = None, **named: Any
    ) -> Any:
        if values and isinstance(values[-1], str):
            *values, dtype = values  # type: ignore[assignment]
        return _draw(name, seed, shape, dtype, *values, *named.values())

    return draw


def _dropout(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
    (inputs,) = _active().values((inputs,))
    if isinstance(rate, int | float) and rate in (0, 1):
        return inputs * (1 - rate)  # It draws nothing, see `KerasDraw.draws_nothing`.
    lengths = shape_of(inputs)
    pairs = zip(lengths, noise_shape or lengths, strict=True)
    shape = [n if given is None else given for n, given in pairs]
    kept = _draw("dropout", seed, shape, inputs.dtype) < 1 - rate
    return ops.where(kept, inputs * 2, ops.zeros_like(inputs))


def _categorical(
    logits: Any, num_samples: Any, dtype: Any = "int32", seed: Any = None
) -> Any:
    (logits,) = _active().values((logits,))
    shape = (*shape_of(logits)[:-1], num_samples)
    drawn = _draw("categorical", seed, shape, dtype)
    return ops.cast(drawn + ops.cast(logits[..., :1] > 0, dtype), dtype)


def _shuffle(x: Any, axis: int = 0, seed: Any = None) -> Any:
    raise NotTraced("shuffles by random numbers")


_FILLED = "normal uniform truncated_normal gamma beta binomial"
#: In place of functions of the backend's random numbers with these names.
DRAWS: dict[str, Callable[..., Any]] = {
    **{name: _filled(name) for name in _FILLED.split()},
    "categorical": _categorical,
    "dropout": _dropout,
    "randint": _filled("randint", "int32"),
    "shuffle": _shuffle,
}
