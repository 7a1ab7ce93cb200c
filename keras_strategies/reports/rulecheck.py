"""Where the rows are in the results of a layer or function, as a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import tree

from keras_strategies.keras_compat.models.building import is_built
from keras_strategies.rows.layer_calls import LayerCall, argument_leaves
from keras_strategies.rows.row_placements import RowKind, RowPlacement, RowProof
from keras_strategies.rows.row_prover import RowProver
from keras_strategies.rows.row_tensors import error_text, is_array, symbolic

#: The rows of arguments without a number of their own.
_ROWS = 8
_KINDS = {
    RowKind.SAME: "the same for all rows",
    RowKind.SUM: "a sum over rows",
    RowKind.MEAN: "a mean over rows",
}
_ADVICE = (
    "Compute each row from its own row of the arguments, with `keras.ops`, and move "
    "computations on all rows out of the layer, for example to the loss. If each row "
    "of the results does depend on its own row only, declare it with `ks.row_wise`."
)
_EXCHANGED = (
    "Replicas exchange its sums over rows in `fit` and `run`, so that it is split all "
    "the same. On JAX those of `run` do not where they have other numbers of rows."
)


@dataclass(frozen=True)
class RowReport:
    """Where the rows are in the results of a call, see `rulecheck`.

    `str(report)` is a table of them, or the operation at fault and what to do.

    Args:
        name: str, the layer or function.
        problem: str, the operation by which rows depend on one another, with the file
            and line that make it, or another reason why the call cannot be split; None
            if it can be.
        outputs: tuple of str, for each tensor among the results, in the order of
            `keras.tree`: `"rows along axis 0"`, `"the same for all rows"`,
            `"a sum over rows"` or `"a mean over rows"`.
        losses: tuple of str, likewise for the losses that the layer adds.
        updates: tuple of pairs of str, the path of each variable that the call assigns,
            and likewise where the rows are in the value.
        draws: tuple of str, likewise for random numbers, in the order of the draws.
        advice: str, what to do about a problem; empty without one.
    """

    name: str
    problem: str | None = None
    outputs: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    updates: tuple[tuple[str, str], ...] = ()
    draws: tuple[str, ...] = ()
    advice: str = ""

    @property
    def is_row_wise(self) -> bool:
        """Whether the call can be split by rows."""
        return self.problem is None

    def __str__(self) -> str:
        if self.problem is not None:
            text = f"{self.name} cannot be split by rows: {self.problem}."
            return f"{text}\n{self.advice}".rstrip()
        lines = [f"{self.name} can be split by rows."]
        groups = (("output", self.outputs), ("loss", self.losses), ("draw", self.draws))
        for what, placed in groups:
            lines += [f"  {what} {i}: {each}" for i, each in enumerate(placed)]
        lines += [f"  variable {path!r}: {each}" for path, each in self.updates]
        return "\n".join(lines)


def rulecheck(layer: Any, *arguments: Any, **options: Any) -> RowReport:
    """Shows where the rows are in the results of a layer or function.

    The call is made with symbolic tensors, as replicas prove it before they split it;
    nothing is computed. It works on every backend, with and without a strategy. On JAX
    XLA splits every call; there it tells whether replicas of `Strategy.run`, which see
    their own rows only, compute what one device computes.

    Args:
        layer: a `keras.layers.Layer`, a `keras.losses.Loss`, or a function of
            `keras.ops`. A layer that is not built is built from the arguments.
        *arguments: its arguments: arrays, tensors, `keras.KerasTensor`s, or shapes of
            float tensors as tuples such as `(None, 8)`. Rows are axis 0 of those with
            as many entries there as the first number, or None.
        **options: its keyword arguments, such as `training=True`.

    Returns:
        A `RowReport`.

    Raises:
        TypeError: if `layer` cannot be called, or is a class or metric.
        ValueError: if no argument has rows, there are fewer than two rows, or the layer
            cannot be built from the arguments.

    Example:

    >>> class Center(keras.layers.Layer):
    ...     def call(self, x):
    ...         return x - keras.ops.mean(x, axis=0)
    >>> print(ks.rulecheck(Center(name="center"), (None, 8)))
    Layer 'center' (Center) cannot be split by rows: 'Subtract' ...
    """
    name = _name(layer)
    given = tuple(_symbolic_shape(each) for each in arguments)
    rows = _rows(argument_leaves(given, options))
    args, kwargs = tree.map_structure(lambda x: _with_rows(x, rows), (given, options))
    if isinstance(layer, keras.layers.Layer) and not is_built(layer):
        _build(layer, name, args, kwargs)
    leaves = argument_leaves(args, kwargs)
    call = LayerCall(layer, layer, (args, kwargs), leaves, rows)
    has_rows = [
        _is_tensor(leaf) and tuple(leaf.shape[:1]) == (rows,) for leaf in leaves
    ]
    sizes = [rows - rows // 2, rows // 2]
    may_exchange = isinstance(layer, keras.layers.Layer)
    proof = RowProver().prove(call, has_rows, sizes, may_exchange)
    if proof.events:
        return RowReport(name, proof.problem_without, advice=_EXCHANGED)
    if proof.problem is not None:
        advice = "" if "`ks.row_wise`" in proof.problem else _ADVICE
        return RowReport(name, proof.problem, advice=advice)
    return _report(name, layer, proof)


def _name(layer: Any) -> str:
    kind = type(layer).__name__
    if isinstance(layer, keras.layers.Layer):
        return f"Layer {layer.name!r} ({kind})"
    if isinstance(layer, (type, keras.metrics.Metric)) or not callable(layer):
        raise TypeError(
            "`ks.rulecheck` takes a layer, a `keras.losses.Loss` or a function of "
            f"`keras.ops`, and then its arguments; found {layer!r}. Make an instance "
            "of a class; of a metric, check the function of rows that it averages."
        )
    if isinstance(layer, keras.losses.Loss):
        return f"Loss {layer.name!r} ({kind})"
    return f"Function {getattr(layer, '__name__', kind)!r}"


def _is_tensor(leaf: Any) -> bool:
    is_variable = isinstance(leaf, keras.Variable)
    return not is_variable and (isinstance(leaf, keras.KerasTensor) or is_array(leaf))


def _symbolic_shape(argument: Any) -> Any:
    """A symbolic tensor for an argument that is a shape."""
    is_shape = type(argument) is tuple and argument
    if is_shape and all(n is None or type(n) is int for n in argument):
        return keras.KerasTensor(argument, keras.config.floatx())
    return argument


def _rows(leaves: Sequence[Any]) -> int:
    shapes = [tuple(x.shape) for x in leaves if _is_tensor(x) and len(x.shape)]
    if not shapes:
        raise ValueError(
            "`ks.rulecheck` looks for the rows of the arguments, axis 0 of the first "
            f"tensor; found no tensor with an axis in {list(leaves)!r}. Pass arrays, "
            "`keras.KerasTensor`s or shapes such as `(None, 8)`."
        )
    lengths = [shape[0] for shape in shapes]
    given = [n for n in lengths if n is not None]
    # Without a number, the first argument has the rows of the others.
    rows = (given or [_ROWS])[0]
    if rows < 2:
        raise ValueError(
            "`ks.rulecheck` divides the rows of the arguments, axis 0 of the first "
            f"tensor, in two parts; found {rows} in shape {shapes[0]}. Pass two rows "
            "or more, or None for their number."
        )
    return int(rows)


def _with_rows(leaf: Any, rows: int) -> Any:
    if isinstance(leaf, keras.KerasTensor) and tuple(leaf.shape[:1]) == (None,):
        return keras.KerasTensor((rows, *leaf.shape[1:]), leaf.dtype)
    if hasattr(leaf, "__array__") and _is_tensor(leaf):
        return keras.ops.convert_to_tensor(leaf)
    return leaf


def _build(layer: Any, name: str, args: Any, kwargs: Any) -> None:
    given, options = tree.map_structure(symbolic, (args, kwargs))
    try:
        layer(*given, **options)
    except Exception as error:  # Of the user's code, or of outputs that Keras refuses.
        if is_built(layer):
            return
        raise ValueError(
            f"{name} is not built, and cannot be built from the arguments "
            f"({error_text(error)}). Pass arguments "
            "that its `call` takes, or call it once before `ks.rulecheck`."
        ) from error


def _report(name: str, layer: Any, proof: RowProof) -> RowReport:
    paths = {id(v): v.path for v in getattr(layer, "variables", ())}
    draws = [
        RowPlacement(RowKind.ROWS if multiple else RowKind.SAME, multiple or 1)
        for multiple in proof.draws
    ]
    return RowReport(
        name,
        outputs=tuple(_text(each) for each in proof.outputs if each is not None),
        losses=tuple(map(_text, proof.losses)),
        updates=tuple(
            (paths.get(key, "of a function"), _text(each))
            for key, each in proof.updates.items()
        ),
        draws=tuple(map(_text, draws)),
    )


def _text(placed: RowPlacement) -> str:
    if placed.kind is not RowKind.ROWS:
        return _KINDS[placed.kind]
    each = "" if placed.multiple == 1 else f", {placed.multiple} entries for each row"
    return f"rows along axis 0{each}"


__all__ = ["RowReport", "rulecheck"]
