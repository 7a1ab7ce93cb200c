"""Pickling of datasets and lookup tables of TensorFlow, on every backend."""

from __future__ import annotations

import sys
from typing import Any

from keras_strategies.errors import InvalidArgumentError

# Operations that call a function of the process that made the dataset.
_PYTHON_CALLS = {"EagerPyFunc", "PyFunc", "PyFuncStateless"}


def tensorflow_reduction(made: Any) -> tuple[Any, ...] | None:
    """The reduction of a dataset or a lookup table; None for other objects.

    Raises:
        ValueError: for a dataset that calls Python functions, an iterator, a concrete
            function, and a mutable table.
    """
    tf: Any = sys.modules.get("tensorflow")
    kinds = type(made).__mro__
    if tf is None or not any(k.__module__.startswith("tensorflow.") for k in kinds):
        return None
    if isinstance(made, tf.data.Dataset):
        return _dataset, (_graph(made), made.element_spec)
    if isinstance(made, tf.lookup.StaticHashTable):
        keys, values = (tensor.numpy() for tensor in made.export())
        default = made.default_value.numpy()
        return _table, (keys, values, made.key_dtype, made.value_dtype, default)
    if isinstance(made, tf.data.Iterator):
        raise InvalidArgumentError(
            f"{made!r} is an iterator of this process. Pass an iterator of each "
            "worker, `iter(coordinator.create_per_worker_dataset(dataset))`, or call "
            "`next` here and pass the batch."
        )
    if isinstance(made, tf.types.experimental.ConcreteFunction):
        raise InvalidArgumentError(
            f"{made!r} is a concrete function, traced with the values that variables "
            "had in this process. Pass the function that `get_concrete_function` was "
            "called on: each worker traces its steps itself."
        )
    mutable = tf.lookup.experimental
    if isinstance(made, (mutable.MutableHashTable, mutable.DenseHashTable)):
        raise InvalidArgumentError(
            f"{made!r} can change, and workers would change copies of it. Use a "
            "`tf.lookup.StaticHashTable`, or a table of each worker: "
            "`coordinator.create_per_worker_values(make_table)`."
        )
    return None


def _graph(dataset: Any) -> bytes:
    """The serialized graph of a dataset, with the contents of tables and variables."""
    import tensorflow as tf

    serialized: bytes = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=1,  # Ignored: checked here.
        strip_device_assignment=True,
    ).numpy()
    graph = tf.compat.v1.GraphDef.FromString(serialized)
    found = {node.op for node in graph.node}
    for function in graph.library.function:
        found.update(node.op for node in function.node_def)
    if found & _PYTHON_CALLS:
        raise InvalidArgumentError(
            f"{dataset!r} calls a Python function, by `from_generator`, "
            "`tf.py_function` or `tf.numpy_function`, which other processes do not "
            "have. Create the dataset in a function, and pass that: "
            "`coordinator.create_per_worker_dataset(dataset_fn)`."
        )
    return serialized


def _dataset(graph: bytes, element_spec: Any) -> Any:
    import tensorflow as tf

    variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
    return tf.data.experimental.from_variant(variant, element_spec)


def _table(
    keys: Any, values: Any, key_dtype: Any, value_dtype: Any, default: Any
) -> Any:
    import tensorflow as tf

    initializer = tf.lookup.KeyValueTensorInitializer(
        keys, values, key_dtype, value_dtype
    )
    return tf.lookup.StaticHashTable(initializer, default)
