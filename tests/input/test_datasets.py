"""Distributed datasets on each backend: every kind, every end, every error."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest
from harness import data

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

ROWS = 22
X = np.arange(ROWS * 3, dtype="float32").reshape(ROWS, 3)
Y = np.arange(ROWS, dtype="int32")


def batches(size: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, ROWS, size)]


class Restarting:
    """An iterable of batches without a length."""

    def __iter__(self):
        return iter(batches())


FEEDS = (
    *(data.tf_data, data.loader, data.py_dataset, data.py_dataset_2_workers),
    *(data.arrays, data.tensors, data.pandas_frames, data.generator),
)


def made(kind: str) -> tuple[Any, dict[str, int]]:
    """A dataset of a kind, and more arguments to distribute it."""
    for feed in FEEDS:
        if feed.__name__ == kind:
            given = feed(data.Data(X, Y), 8)
            x = (given["x"], given["y"]) if "y" in given else given["x"]
            return x, {k: v for k, v in given.items() if k == "batch_size"}
    return (batches() if kind == "list" else Restarting()), {}


KINDS = [*(feed.__name__ for feed in FEEDS), "list", "restarting"]
KNOWN_LENGTH = set(KINDS) - {"restarting", "generator"}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def distribute(strategy, kind: str, **options):
    given, arguments = made(kind)
    return strategy.experimental_distribute_dataset(given, **arguments, **options)


def numpy(strategy, value) -> list[np.ndarray]:
    """The components of a value, after asserting that they are the backend's."""
    found = strategy.experimental_local_results(value)
    assert len(found) == strategy.num_replicas_in_sync
    assert all(keras.ops.is_tensor(component) for component in found)
    return [keras.ops.convert_to_numpy(component) for component in found]


def rows(strategy, dataset) -> list[list[list[int]]]:
    """The targets of each step and replica; inputs are asserted to go with them."""
    steps = []
    for x, y in dataset:
        xs, ys = numpy(strategy, x), numpy(strategy, y)
        for own_x, own_y in zip(xs, ys, strict=True):
            np.testing.assert_array_equal(own_x, X[own_y])
        steps.append([own_y.tolist() for own_y in ys])
    return steps


def test_each_kind_is_split_by_rows(mirrored, kind) -> None:
    dataset = distribute(mirrored, kind)
    kinds = [((None, 3), "float32"), ((None,), "int32")]
    for spec, (shape, dtype) in zip(dataset.element_spec, kinds, strict=True):
        assert isinstance(spec, ks.PerReplica)
        for own in spec.values:
            assert tuple(own.shape) == shape
            assert keras.backend.standardize_dtype(own.dtype) == dtype
    if kind in KNOWN_LENGTH:
        assert dataset.cardinality == len(dataset) == 3
    else:
        assert dataset.cardinality is None
        with pytest.raises(ks.errors.InvalidTypeError, match=r"unknown.*call `take`"):
            len(dataset)
    expected = [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10, 11], [12, 13, 14, 15]],
        [[16, 17, 18], [19, 20, 21]],
    ]
    assert rows(mirrored, dataset) == expected
    if kind == "generator":
        with pytest.raises(ks.errors.InputError, match=r"iterated once.*new iterator"):
            iter(dataset).get_next()
    else:
        # A distributed dataset can be distributed: its global batches are.
        again = mirrored.experimental_distribute_dataset(dataset)
        assert rows(mirrored, again) == expected


def test_each_strategy_gets_every_row_once_in_order(strategy) -> None:
    dataset = distribute(strategy, "list")
    found = [row for step in rows(strategy, dataset) for part in step for row in part]
    assert found == Y.tolist()


def test_the_last_batch_is_smaller_and_nothing_is_dropped(mirrored) -> None:
    """`range(10).batch(4)` on 2 replicas ends [8], [9]."""
    dataset = mirrored.make_experimental_numpy_dataset(np.arange(10)).batch(4)
    steps = [
        [part.tolist() for part in numpy(mirrored, batch)]
        for batch in mirrored.experimental_distribute_dataset(dataset)
    ]
    assert steps == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]


def test_structures_keep_their_containers(mirrored) -> None:
    batch = {"in": (X[:4], [X[:4]]), "weight": None}
    (found,) = mirrored.experimental_distribute_dataset([batch])
    assert isinstance(found["in"], tuple)
    assert isinstance(found["in"][1], list)
    assert found["weight"] is None
    assert isinstance(found["in"][1][0], ks.PerReplica)


def test_a_buffer_that_its_owner_writes_over(mirrored) -> None:
    """Batches made ahead are not changed by the ones made after them."""

    class Reusing:
        def __iter__(self):
            buffer = np.zeros((4,), "float32")
            for i in range(5):
                buffer[:] = i
                yield buffer

    options = ks.InputOptions(experimental_per_replica_buffer_size=3)
    dataset = mirrored.experimental_distribute_dataset(Reusing(), options)
    for i, batch in enumerate(dataset):
        for part in numpy(mirrored, batch):
            assert part.tolist() == [i, i]


def test_ends_of_an_iterator(mirrored) -> None:
    iterator = iter(distribute(mirrored, "list"))
    assert iter(iterator) is iterator
    for _ in range(3):
        iterator.get_next()
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)
    with pytest.raises(ks.errors.OutOfRangeError, match="no more batches") as caught:
        iterator.get_next()
    assert isinstance(caught.value, IndexError)
    last = str(caught.value).splitlines()[-1]
    assert last == "See `keras-strategies explain OutOfRangeError`"
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        assert isinstance(caught.value, tf.errors.OutOfRangeError)
    assert not iterator.get_next_as_optional().has_value()


def test_an_error_of_the_source_keeps_its_type(mirrored) -> None:
    def failing():
        yield batches()[0]
        raise FileNotFoundError("part-2")

    iterator = iter(mirrored.experimental_distribute_dataset(failing()))
    next(iterator)
    with pytest.raises(FileNotFoundError, match="part-2"):
        next(iterator)
    assert "ks-input" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(StopIteration):
        next(iterator)


def test_what_is_no_dataset(mirrored) -> None:
    distribute = mirrored.experimental_distribute_dataset
    make = mirrored.make_experimental_numpy_dataset
    from_function = mirrored.distribute_datasets_from_function
    parts = [{"left": X[:8], "right": [Y[:7]]}]
    each = ks.InputOptions(experimental_replication_mode="PER_REPLICA")
    for call, text in (
        (lambda: distribute(3), r"of type int\) is not a dataset"),
        (lambda: distribute(batches(), batch_size=4), "is batched already"),
        (lambda: distribute(batches(), options=3), "`options` must be a"),
        (lambda: distribute(batches(), each), "distribute_datasets_from_function"),
        (lambda: distribute(make((X, Y))), "is not batched"),
        (lambda: next(iter(distribute(range(9)))), "a range, is not batched"),
        (lambda: next(iter(distribute(parts))), r"\['left'\] of shape \(8, 3\), .*7"),
        (lambda: distribute([]).element_spec, "empty"),
        (lambda: make(np.float32(3)), "data of shape"),
        (lambda: make((X, Y[:5])), r"data\[0\] of shape \(22, 3\), data\[1\]"),
        (lambda: from_function(batches()), "function of an InputContext"),
        (lambda: mirrored.run(lambda: distribute([])), "inside a replica function"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=text):
            call()


def test_tf_data_that_is_not_batched(mirrored) -> None:
    tf = pytest.importorskip("tensorflow")
    text = (
        r"not batched.*batch\[0\] of shape \(3,\), batch\[1\] of shape \(\)"
        r".*\.batch\(global_batch_size\)"
    )
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(ks.errors.BatchError, match=text):
        mirrored.experimental_distribute_dataset(dataset)


def test_a_function_is_called_once_and_its_batches_are_not_split(mirrored) -> None:
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return batches(4)

    dataset = mirrored.distribute_datasets_from_function(dataset_fn)
    assert rows(mirrored, dataset) == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10, 11], [12, 13, 14, 15]],
        [[16, 17, 18, 19], [20, 21]],
    ]
    assert len(dataset) == 3
    assert contexts == [ks.InputContext(1, 0, 2)]


def test_a_dataset_for_each_replica(mirrored) -> None:
    """The first one ends before the second."""
    made = iter([batches(4)[:1], batches(8)[1:]])
    each = ks.InputOptions(experimental_replication_mode="PER_REPLICA")
    dataset = mirrored.distribute_datasets_from_function(lambda _: next(made), each)
    steps = [[[0, 1, 2, 3], list(range(8, 16))], [[], list(range(16, 22))]]
    assert rows(mirrored, dataset) == steps


def test_array_dataset(backend_name) -> None:
    dataset = ks.get_strategy().make_experimental_numpy_dataset(X)
    if backend_name == "tensorflow":
        import tensorflow as tf

        assert isinstance(dataset, tf.data.Dataset)
        return
    assert len(dataset) == ROWS
    assert [b.shape[0] for b in dataset.batch(8)] == [8, 8, 6]
    assert [b.shape[0] for b in dataset.batch(8, drop_remainder=True)] == [8, 8]
    assert dataset.batch(8).repeat(-1).cardinality() is None
    assert dataset.batch(8).repeat(3).cardinality() == 9
    with pytest.raises(ks.errors.InvalidTypeError, match="call `repeat` with a number"):
        len(dataset.repeat())
    with pytest.raises(ValueError, match="`batch` once"):
        dataset.batch(8).batch(8)
    with pytest.raises(ValueError, match="1 or more"):
        dataset.batch(0)
    orders = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        passes = list(dataset.shuffle().batch(8).repeat(2))
        orders.append(np.concatenate(passes))
    np.testing.assert_array_equal(*orders)
    first, second = np.split(orders[0], 2)
    np.testing.assert_array_equal(np.sort(first, 0), X)
    assert not np.array_equal(first, second)


def test_the_default_strategy_passes_datasets_through() -> None:
    default = ks.get_strategy()
    for kind in ("list", "tf_data", "loader", "restarting"):
        given, _ = made(kind)
        assert default.experimental_distribute_dataset(given) is given
        assert default.distribute_datasets_from_function(lambda _, g=given: g) is given


@pytest.mark.parametrize("kind", ["text", "objects", "tf.data text", "ragged"])
def test_text_and_ragged_rows_are_for_tensorflow_alone(mirrored, backend_name, kind):
    tf = pytest.importorskip("tensorflow")
    text, numbers = np.array(["a", "b", "c", "d"]), np.ones((4, 2), "float32")
    batch, ragged = {"x": numbers, "word": text}, [[1.0, 2.0], [3.0], [], [4.0]]
    of_tensors = tf.data.Dataset.from_tensors
    datasets = {
        "text": [batch],
        "objects": [batch | {"word": text.astype(object)}],
        "tf.data text": of_tensors(batch),
        "ragged": of_tensors({"word": tf.ragged.constant(ragged)}),
    }
    if backend_name == "tensorflow":
        batches = list(mirrored.experimental_distribute_dataset(datasets[kind]))
        assert len(batches) == 1
        return
    with pytest.raises(ValueError, match=r"batch\['word'\] of .*KERAS_BACKEND"):
        list(mirrored.experimental_distribute_dataset(datasets[kind]))


def scalars(kind: str, count: int):
    if kind == "list":
        return [np.int32(i) for i in range(count)]
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.range(count).map(lambda i: tf.cast(i, "int32"))


@pytest.mark.parametrize("kind", ["list", "tf_data"])
def test_values_from_a_function_go_to_the_replicas(mirrored, kind) -> None:
    dataset = mirrored.distribute_datasets_from_function(lambda _: scalars(kind, 5))
    found = [
        [int(part) for part in mirrored.experimental_local_results(step)]
        for step in dataset
    ]
    assert found == [[0, 1], [2, 3]]  # There: the same.
    assert len(dataset) == 2
    spec = dataset.element_spec
    assert [tuple(own.shape) for own in spec.values] == [(), ()]
    sums = [
        float(mirrored.reduce("SUM", mirrored.run(lambda x: x + 1, (step,))))
        for step in dataset
    ]
    assert sums == [3.0, 7.0]


def test_none_in_elements_of_a_tf_data_dataset(mirrored) -> None:
    tf = pytest.importorskip("tensorflow")
    data = tf.data.Dataset.from_tensor_slices(X).batch(8).map(lambda x: (x, None))
    seen = []

    def total(part):
        x, weights = part
        seen.append(weights)
        return keras.ops.sum(x)

    found = [
        float(mirrored.reduce("sum", mirrored.run(total, args=(batch,)), axis=None))
        for batch in mirrored.experimental_distribute_dataset(data)
    ]
    assert found == [X[i : i + 8].sum() for i in range(0, len(X), 8)]
    assert set(seen) == {None}
