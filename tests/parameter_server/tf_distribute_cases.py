"""Scheduled functions and sharded variables, under `tf.distribute` and this package.

    python tests/parameter_server/tf_distribute_cases.py --record

runs the cases under `tf.distribute` with servers in its process, and records their
outcomes in `tf_distribute_cases.json`. `test_tf_distribute_cases.py` compares this
package with them; `DIFFERENT` has the cases that differ, with the reason.
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

RECORD = Path(__file__).with_suffix(".json")

#: Cases with another outcome than under `tf.distribute`.
DIFFERENT = {
    "a captured iterator": "`tf.distribute` takes iterators as arguments only.",
    "a concrete function": "It has the values that variables had when it was traced: "
    "here the error says to pass the function.",
    "an attribute of an object": "There only objects that can be traced are arguments.",
    "a remote value as argument": "There it is an error, here its value.",
}

Pair = collections.namedtuple("Pair", "first second")


class Inputs:
    """An object with an iterator."""

    def __init__(self, iterator: Any):
        self.iterator = iterator


class Side:
    """Names with which a case is written once.

    Args:
        strategy: with two workers and two servers; variables with more than one row
            are in two parts.
        coordinator: its `ClusterCoordinator`.
        function: `tf.function`, or the identity.
        variable: callable of a value that creates a variable.
        dataset: callable of two numbers that makes a dataset of the range.
        numpy: callable of a tensor or a variable.
    """

    def __init__(
        self,
        strategy: Any,
        coordinator: Any,
        function: Callable[[Any], Any],
        variable: Callable[[Any], Any],
        dataset: Callable[[int, int], Any],
        numpy: Callable[[Any], Any],
    ):
        self.strategy = strategy
        self.coordinator = coordinator
        self.function = function
        self.dataset = dataset
        self.numpy = numpy
        self._variable = variable

    def variable(self, value: Any) -> Any:
        with self.strategy.scope():
            return self._variable(np.asarray(value, "float32"))

    def iterator(self, start: int = 7, stop: int = 90) -> Any:
        dataset = self.dataset
        make = lambda: dataset(start, stop)  # noqa: E731
        return iter(self.coordinator.create_per_worker_dataset(make))

    def schedule(self, fn: Any, *args: Any) -> Any:
        return self.coordinator.schedule(self.function(fn), args)

    def call(self, fn: Any, *args: Any) -> Any:
        return self.schedule(fn, *args).fetch()

    def value(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.value(part) for part in value]
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        return np.asarray(self.numpy(value)).tolist()


def _several(side: Side) -> Any:
    total = side.variable(1.0)
    for i in range(5):
        side.schedule(lambda x: total.assign_add(x), np.float32(i))
    side.coordinator.join()
    return [side.coordinator.done(), total]


def _argument(side: Side) -> Any:
    total = side.variable(1.0)
    side.schedule(lambda v: v.assign_add(2.0), total)
    side.coordinator.join()
    return total


def _remote_value(side: Side) -> Any:
    one = np.float32(1)
    return side.call(lambda x: x + 1, side.schedule(lambda x: x + 1, one))


def _exhausted(side: Side) -> Any:
    iterator = side.iterator(0, 1)
    return side.call(lambda it: (next(it), next(it)), iterator)


def _exhausted_join(side: Side) -> Any:
    side.schedule(lambda it: (next(it), next(it)), side.iterator(0, 1))
    side.coordinator.join()


def _after_an_error(side: Side) -> Any:
    try:
        _exhausted_join(side)
    except Exception:
        side.coordinator.join()
        return side.call(lambda x: x, np.float32(3))


def _dataset(side: Side) -> Any:
    dataset = side.coordinator.create_per_worker_dataset(side.dataset(7, 90))
    return side.call(lambda it: next(it), iter(dataset))


def _captured(side: Side) -> Any:
    iterator = side.iterator()
    return side.call(lambda: next(iterator))


def _concrete(side: Side) -> Any:
    import tensorflow as tf

    traced = tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([]))
    return side.coordinator.schedule(traced, (tf.constant(1.0),)).fetch()


def _fetched(side: Side) -> Any:
    one = np.float32(1)
    values = {
        "a": side.schedule(lambda x: x, one),
        "b": [side.schedule(lambda x: x, one)],
    }
    found = side.coordinator.fetch(values)
    return [found["a"], found["b"]]


def _parts(side: Side) -> Any:
    table = side.variable(np.arange(10.0).reshape(5, 2))
    return [[list(part.shape) for part in table.variables], table]


def _rows(side: Side) -> Any:
    table = side.variable(np.arange(10.0).reshape(5, 2))
    return [table[1:4], table[-1], table[1:4, 0], table[:, 1]]


def _assigned(side: Side) -> Any:
    table = side.variable(np.zeros((5, 2)))
    table.assign(np.ones((5, 2), "float32"))
    table.assign_add(np.ones((5, 2), "float32"))
    table.assign_sub(np.full((5, 2), 0.5, "float32"))
    return table


CASES: dict[str, Callable[[Side], Any]] = {
    "updates of several functions": _several,
    "a variable as argument": _argument,
    "a remote value as argument": _remote_value,
    "an iterator as argument": lambda s: s.call(lambda it: next(it), s.iterator()),
    "an iterator in a named tuple": lambda s: s.call(
        lambda pair: next(pair.first), Pair(s.iterator(), np.float32(1))
    ),
    "an iterator in an ordered dict": lambda s: s.call(
        lambda found: next(found["a"]), collections.OrderedDict(a=s.iterator())
    ),
    "a named tuple returned": lambda s: s.call(lambda x: Pair(x, x), np.float32(1)),
    "a captured iterator": _captured,
    "an attribute of an object": lambda s: s.call(
        lambda found: next(found.iterator), Inputs(s.iterator())
    ),
    "an exhausted iterator, fetch": _exhausted,
    "an exhausted iterator, join": _exhausted_join,
    "after an error": _after_an_error,
    "a dataset itself": _dataset,
    "a structure fetched": _fetched,
    "parts of a variable": _parts,
    "rows of a variable in parts": _rows,
    "assignments to a variable in parts": _assigned,
}
#: Cases with objects of TensorFlow.
CASES_OF_TENSORFLOW = {"a concrete function": _concrete}


def outcome(run: Callable[[Side], Any], side: Side) -> Any:
    """The value of a case, or the kind of its error; leaves no error behind."""
    try:
        return {"value": side.value(run(side))}
    except Exception as error:
        bases = [kind.__name__ for kind in type(error).__mro__]
        kind = "OutOfRangeError" if "OutOfRangeError" in bases else "other"
        return {"error": kind}
    finally:
        try:
            side.coordinator.join()
        except Exception as error:
            assert str(error)  # That of the case.


def tensorflow() -> Side:
    """`tf.distribute`, with a cluster of servers in this process."""
    import tensorflow as tf

    from keras_strategies.cluster.resolvers.local_processes import free_addresses

    addresses = free_addresses(5)
    cluster = tf.train.ClusterSpec(
        {"worker": addresses[:2], "ps": addresses[2:4], "chief": addresses[4:]}
    )
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=4)
    for job in ("worker", "ps"):
        for i in range(2):
            tf.distribute.Server(cluster, job, i, protocol="grpc", config=config)
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc"),
        tf.distribute.experimental.partitioners.FixedShardsPartitioner(2),
    )
    return Side(
        strategy,
        tf.distribute.coordinator.ClusterCoordinator(strategy),
        tf.function,
        tf.Variable,
        tf.data.Dataset.range,
        lambda value: tf.convert_to_tensor(value).numpy(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", required=True)
    parser.parse_args()
    side = tensorflow()
    cases = CASES | CASES_OF_TENSORFLOW
    found = {name: outcome(run, side) for name, run in cases.items()}
    lines = (
        f" {json.dumps(name)}: {json.dumps(value)}" for name, value in found.items()
    )
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
