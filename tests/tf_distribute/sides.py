"""The two sides of a comparison: names with which a case is written once."""

from __future__ import annotations

from typing import Any

import numpy as np

DEVICES = ["cpu:0", "cpu:1"]


class Side:
    """What a case uses.

    Args:
        kind: "one" for one device, "two" for two mirrored ones.
    """

    #: `tf.distribute`, or this package.
    distribute: Any
    #: `tf.function` or `ks.function`.
    function: Any

    def __init__(self, kind: str):
        self.kind = kind
        self.devices = DEVICES if kind == "two" else DEVICES[:1]
        if kind == "one":
            self.strategy = self.distribute.OneDeviceStrategy("cpu:0")
        else:
            self.strategy = self.distribute.MirroredStrategy(DEVICES)

    def tensor(self, value: Any, dtype: str = "float32") -> Any:
        raise NotImplementedError

    def variable(self, value: Any, **options: Any) -> Any:
        raise NotImplementedError

    def cast(self, value: Any, dtype: str) -> Any:
        raise NotImplementedError

    def numpy(self, value: Any) -> Any:
        raise NotImplementedError

    @property
    def context(self) -> Any:
        return self.distribute.get_replica_context()

    def id(self, dtype: str = "float32") -> Any:
        """The number of the replica, from 1."""
        return self.cast(self.context.replica_id_in_sync_group, dtype) + self.cast(
            1, dtype
        )

    def run(self, fn: Any, *args: Any) -> Any:
        return self.strategy.run(fn, args)

    def value(self, value: Any) -> Any:
        """A value as lists of numbers, by replica if it is a distributed one."""
        if isinstance(value, (list, tuple)):
            return [self.value(part) for part in value]
        if isinstance(value, dict):
            return {key: self.value(part) for key, part in value.items()}
        if value is None or isinstance(value, (str, bool, int, float)):
            return value
        if isinstance(value, self.distribute.DistributedValues) and not (
            self.is_variable(value)
        ):
            return {"replicas": self.local(value)}
        return np.asarray(self.numpy(value)).tolist()

    def local(self, value: Any) -> list[Any]:
        """The components of a value."""
        parts = self.strategy.experimental_local_results(value)
        return [self.value(part) for part in parts]

    def is_variable(self, value: Any) -> bool:
        raise NotImplementedError


def tensorflow(kind: str) -> Side:
    """`tf.distribute` of TensorFlow."""
    import tensorflow as tf

    class TensorFlow(Side):
        distribute = tf.distribute
        function = staticmethod(tf.function)

        def tensor(self, value: Any, dtype: str = "float32") -> Any:
            return tf.constant(value, dtype)

        def variable(self, value: Any, **options: Any) -> Any:
            dtype = options.pop("dtype", "float32")
            if "aggregation" in options:
                name = options["aggregation"].upper()
                options["aggregation"] = tf.VariableAggregation[name]
            if "synchronization" in options:
                name = options["synchronization"].upper()
                options["synchronization"] = tf.VariableSynchronization[name]
            with self.strategy.scope():
                return tf.Variable(value, dtype=dtype, **options)

        def cast(self, value: Any, dtype: str) -> Any:
            return tf.cast(value, dtype)

        def numpy(self, value: Any) -> Any:
            return value.numpy() if hasattr(value, "numpy") else value

        def is_variable(self, value: Any) -> bool:
            return isinstance(value, tf.Variable)

    return TensorFlow(kind)


def ours(kind: str) -> Side:
    """This package, on the backend of `KERAS_BACKEND`."""
    import keras

    import keras_strategies as ks

    class Ours(Side):
        distribute = ks
        function = staticmethod(ks.function)

        def tensor(self, value: Any, dtype: str = "float32") -> Any:
            return keras.ops.convert_to_tensor(np.asarray(value, dtype))

        def variable(self, value: Any, **options: Any) -> Any:
            options.setdefault("dtype", "float32")
            with self.strategy.scope():
                return keras.Variable(value, **options)

        def cast(self, value: Any, dtype: str) -> Any:
            return keras.ops.cast(value, dtype)

        def numpy(self, value: Any) -> Any:
            return keras.ops.convert_to_numpy(value)

        def is_variable(self, value: Any) -> bool:
            return isinstance(value, keras.Variable)

    return Ours(kind)
