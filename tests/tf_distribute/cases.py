"""One table of cases: a name, and a function of a `Side` that returns a value.

A new case is an entry of `CASES`. Its name begins with its subject; the table of the
page about migration refers to cases by patterns of their names.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from tf_distribute.sides import Side

CASES: dict[str, Callable[[Side], Any]] = {}

AGGREGATIONS = ("none", "sum", "mean", "only_first_replica")
SYNCHRONIZATIONS = ("auto", "on_write", "on_read", "none")


def case(name: str) -> Callable[[Callable[[Side], Any]], Callable[[Side], Any]]:
    """Adds a function to the table."""

    def add(fn: Callable[[Side], Any]) -> Callable[[Side], Any]:
        assert name not in CASES, name
        CASES[name] = fn
        return fn

    return add


# Variables, by synchronization, aggregation, dtype and context.


def _own(side: Side, dtype: str) -> Any:
    """The number of the replica, from 1; False on the first one for `bool`."""
    return side.cast(side.id("int32") - 1, dtype) if dtype == "bool" else side.id(dtype)


def _assigned(side: Side, v: Any, dtype: str) -> Any:
    v.assign(side.tensor(8 if dtype != "bool" else False, dtype))


def _added(side: Side, v: Any, dtype: str) -> Any:
    v.assign_add(side.tensor(2, dtype))


def _assigned_by_replicas(side: Side, v: Any, dtype: str) -> Any:
    def assign() -> None:
        v.assign(_own(side, dtype))

    side.run(assign)


def _added_by_replicas(side: Side, v: Any, dtype: str) -> Any:
    def add() -> None:
        v.assign_add(side.id(dtype))

    side.run(add)


def _added_in_a_function(side: Side, v: Any, dtype: str) -> Any:
    def call() -> Any:
        _added_by_replicas(side, v, dtype)
        return side.tensor(0)

    side.function(call)()


CONTEXTS: dict[str, Callable[[Side, Any, str], Any]] = {
    "created": lambda side, v, dtype: None,
    "assigned outside of run": _assigned,
    "added to outside of run": _added,
    "assigned in run": _assigned_by_replicas,
    "added to in run": _added_by_replicas,
    "read in run": lambda side, v, dtype: side.run(
        lambda: side.cast(v, "float32") + 0.0
    ),
    "added to in a function": _added_in_a_function,
    "reduced": lambda side, v, dtype: side.strategy.reduce("SUM", v, axis=None),
}


def _variable(synchronization: str, aggregation: str, dtype: str, context: str) -> Any:
    def run(side: Side) -> Any:
        v = side.variable(
            6 if dtype != "bool" else True,
            dtype=dtype,
            trainable=False,
            synchronization=synchronization,
            aggregation=aggregation,
        )
        returned = CONTEXTS[context](side, v, dtype)
        return [side.value(returned), side.value(v), side.local(v)]

    return run


for _sync, _aggregation, _dtype, _context in itertools.product(
    SYNCHRONIZATIONS, AGGREGATIONS, ("float32", "int32", "bool"), CONTEXTS
):
    if _dtype == "bool" and "added" in _context:
        continue
    if _sync == "none" and _aggregation != "none":
        continue
    _name = f"variables: {_sync} {_aggregation} {_dtype} {_context}"
    case(_name)(_variable(_sync, _aggregation, _dtype, _context))


# Collectives.

VALUES: dict[str, Callable[[Side], Any]] = {
    "by replica": lambda side: side.run(side.id),
    "integers by replica": lambda side: side.run(lambda: side.id("int32")),
    "rows by replica": lambda side: side.run(
        lambda: side.tensor([[1, 2], [3, 4]]) * side.id()
    ),
    "equal": lambda side: side.run(lambda: side.tensor(2)),
    "python number": lambda side: side.run(lambda: 5.0),
    "argument": lambda side: side.run(lambda x: x, side.tensor(5)),
    "tensor": lambda side: side.tensor(2),
    "vector": lambda side: side.tensor([1, 2]),
    "array": lambda side: np.ones(2, "float32"),
    "number": lambda side: 2.0,
    "variable": lambda side: side.variable(3),
    "reduced": lambda side: side.strategy.reduce("SUM", side.run(side.id), axis=None),
    "all-reduced": lambda side: side.run(
        lambda: side.context.all_reduce("SUM", side.tensor(1))
    ),
    "structure": lambda side: side.run(lambda: {"a": side.id(), "b": [side.id()]}),
}


def _reduce(op: str, value: str, axis: int | None) -> Any:
    return lambda side: side.value(
        side.strategy.reduce(op, VALUES[value](side), axis=axis)
    )


def _gather(value: str, axis: int) -> Any:
    return lambda side: side.value(side.strategy.gather(VALUES[value](side), axis=axis))


def _reduce_to(op: str, value: str) -> Any:
    return lambda side: side.value(
        side.strategy.extended.reduce_to(
            side.distribute.ReduceOp[op], VALUES[value](side), "cpu:0"
        )
    )


for _op, _value in itertools.product(("SUM", "MEAN"), VALUES):
    case(f"reduce: {_op} of {_value}")(_reduce(_op, _value, None))
    if _value in ("by replica", "equal", "tensor", "variable", "number"):
        case(f"reduce_to: {_op} of {_value}")(_reduce_to(_op, _value))
    if "rows" in _value or "vector" in _value:
        case(f"reduce: {_op} of {_value} along rows")(_reduce(_op, _value, 0))
for _value in ("by replica", "rows by replica", "vector", "all-reduced"):
    for _axis in (0, 1):
        case(f"gather: {_value} along {_axis}")(_gather(_value, _axis))


def _all_reduce(op: str, dtype: str, in_function: bool) -> Any:
    def run(side: Side) -> Any:
        def fn() -> Any:
            own = side.tensor([0, 1], dtype) + side.id(dtype)
            return side.context.all_reduce(op, own)

        def call() -> Any:
            return side.run(fn)

        return side.value((side.function(call) if in_function else call)())

    return run


for _op, _dtype, _in in itertools.product(
    ("SUM", "MEAN"), ("float32", "int32"), (False, True)
):
    _where = "in a function" if _in else "eagerly"
    case(f"all_reduce: {_op} of {_dtype} {_where}")(_all_reduce(_op, _dtype, _in))


@case("all_gather: rows")
def _(side: Side) -> Any:
    return side.value(
        side.run(lambda: side.context.all_gather(side.tensor([1, 2]) * side.id(), 0))
    )


def _merge_call(merge: Callable[[Side, Any, Any], Any]) -> Any:
    def run(side: Side) -> Any:
        def fn() -> Any:
            return side.context.merge_call(
                lambda strategy, x: merge(side, strategy, x), (side.id(),)
            )

        return side.value([side.run(fn), side.function(lambda: side.run(fn))()])

    return run


for _name, _merge in {
    "argument": lambda side, strategy, x: x,
    "reduced": lambda side, strategy, x: strategy.reduce("SUM", x, axis=None),
    "constant": lambda side, strategy, x: side.tensor(3),
    "python number": lambda side, strategy, x: 5.0,
}.items():
    case(f"merge_call: {_name}")(_merge_call(_merge))


@case("merge_call: update of a variable")
def _(side: Side) -> Any:
    v = side.variable(1)

    def merge(strategy: Any, x: Any) -> None:
        total = strategy.extended.reduce_to(side.distribute.ReduceOp.SUM, x, v)
        strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(total,))

    side.run(lambda: side.context.merge_call(merge, (side.id(),)))
    return side.value(v)


@case("eager: reduced and gathered values with variables")
def _(side: Side) -> Any:
    v = side.variable(1)
    v.assign_add(side.strategy.reduce("SUM", side.run(side.id), axis=None))
    gathered = side.strategy.gather(side.run(lambda: side.tensor([1])), axis=0)
    v.assign_sub(gathered[0])
    v.assign_add(side.strategy.experimental_local_results(side.run(side.id))[-1])
    return side.value([v, v + side.strategy.reduce("SUM", side.run(side.id), None)])


# Input.


def _values(make: Callable[[Side, Any], Any]) -> Any:
    return lambda side: side.value(
        side.strategy.experimental_distribute_values_from_function(
            lambda context: make(side, context.replica_id_in_sync_group)
        )
    )


for _name, _make in {
    "tensor": lambda side, i: side.tensor(i),
    "dict": lambda side, i: {"a": side.tensor(i), "b": [side.tensor(i + 1)]},
    "tuple": lambda side, i: (side.tensor(i), side.tensor(2)),
}.items():
    case(f"values_from_function: {_name}")(_values(_make))


for _op in ("SUM", "MEAN"):
    for _to in ("a device", "a variable", "all devices", "several"):

        def _(side: Side, op: str = _op, to: str = _to) -> Any:
            v = side.variable(1)
            own = side.distribute.ReduceOp[op]
            places = {"a device": "cpu:0", "a variable": v, "all devices": side.devices}

            def merge(strategy: Any, x: Any) -> Any:
                if to == "several":
                    pairs = [(x, v), (x, "cpu:0")]
                    return strategy.extended.batch_reduce_to(own, pairs)[0]
                return strategy.extended.reduce_to(own, x, places[to])

            return side.local(
                side.run(lambda: side.context.merge_call(merge, (side.id(),)))
            )[0]

        case(f"merge_call: {_op} to {_to}")(_)


def _dataset(make: Callable[[Any], Any], by: str) -> Any:
    def run(side: Side) -> Any:
        import tensorflow as tf

        strategy = side.strategy
        if by == "dataset":
            found = strategy.experimental_distribute_dataset(make(tf))
        else:
            options = None
            if by == "replica":
                mode = side.distribute.InputReplicationMode.PER_REPLICA
                options = side.distribute.InputOptions(
                    experimental_replication_mode=mode,
                    experimental_place_dataset_on_device=False,
                    experimental_fetch_to_device=False,
                )
            found = strategy.distribute_datasets_from_function(
                lambda context: make(tf), options
            )
        return [side.value(batch) for batch in found]

    return run


DATASETS: dict[str, Callable[[Any], Any]] = {
    "even batches": lambda tf: tf.data.Dataset.range(8).batch(4),
    "uneven batches": lambda tf: tf.data.Dataset.range(11).batch(4),
    "batches of odd size": lambda tf: tf.data.Dataset.range(9).batch(3),
    "one row at the end": lambda tf: tf.data.Dataset.range(5).batch(4),
    "whole batches": lambda tf: tf.data.Dataset.range(8).batch(4, drop_remainder=True),
    "an empty dataset": lambda tf: tf.data.Dataset.range(0).batch(4),
    "scalars": lambda tf: tf.data.Dataset.range(4),
    "an odd number of scalars": lambda tf: tf.data.Dataset.range(5),
    "pairs of different axes": lambda tf: tf.data.Dataset.from_tensor_slices(
        (tf.range(4), tf.reshape(tf.range(12), (4, 3)))
    ),
    "unknown length": lambda tf: (
        tf.data.Dataset.range(9).filter(lambda i: i > 0).batch(4)
    ),
}
for _by, _name in itertools.product(("dataset", "worker", "replica"), DATASETS):
    case(f"input: by {_by} {_name}")(_dataset(DATASETS[_name], _by))


def outcome(case: Callable[[Side], Any], side: Side) -> Any:
    """The value of a case, or the kind of its error."""
    try:
        return {"value": case(side)}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)[:200]}
