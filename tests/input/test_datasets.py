"""Distributed datasets on each backend: every kind, every end, every error."""

from __future__ import annotations

import contextlib
import gc
import threading

import keras
import numpy as np
import pytest

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

ROWS = 22
X = np.arange(ROWS * 3, dtype="float32").reshape(ROWS, 3)
Y = np.arange(ROWS, dtype="int32")


def batches(size: int = 8) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, ROWS, size)]


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int):
        return batches()[index]


class Restarting:
    """An iterable of batches without a length."""

    def __iter__(self):
        return iter(batches())


def tf_data():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


def loader(workers: int = 0):
    torch = pytest.importorskip("torch")
    rows = list(zip(X, Y, strict=True))
    return torch.utils.data.DataLoader(rows, batch_size=8, num_workers=workers)


def frames():
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame(X), pandas.Series(Y)


KINDS = {
    "tf_data": (tf_data, {}),
    "loader": (loader, {}),
    "py_dataset": (Sequence, {}),
    "py_dataset_2_workers": (lambda: Sequence(workers=2), {}),
    "arrays": (lambda: (X, Y), {"batch_size": 8}),
    "tensors": (
        lambda: (keras.ops.convert_to_tensor(X), keras.ops.convert_to_tensor(Y)),
        {"batch_size": 8},
    ),
    "frames": (frames, {"batch_size": 8}),
    "list": (batches, {}),
    "restarting": (Restarting, {}),
    "generator": (lambda: (batch for batch in batches()), {}),
}
KNOWN_LENGTH = set(KINDS) - {"restarting", "generator"}


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


def distribute(strategy, kind: str, **options):
    make, arguments = KINDS[kind]
    return strategy.experimental_distribute_dataset(make(), **arguments, **options)


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
        assert rows(mirrored, dataset) == expected


def test_each_strategy_gets_every_row_once_in_order(strategy) -> None:
    dataset = distribute(strategy, "list")
    found = [row for step in rows(strategy, dataset) for part in step for row in part]
    assert found == Y.tolist()


def test_cardinality(mirrored, kind) -> None:
    dataset = distribute(mirrored, kind)
    if kind in KNOWN_LENGTH:
        assert dataset.cardinality == len(dataset) == 3
    else:
        assert dataset.cardinality is None
        with pytest.raises(ks.errors.InvalidTypeError, match=r"unknown.*call `take`"):
            len(dataset)


def test_the_last_batch_is_smaller_and_nothing_is_dropped(mirrored) -> None:
    """`range(10).batch(4)` on 2 replicas ends [8], [9]."""
    dataset = mirrored.make_experimental_numpy_dataset(np.arange(10)).batch(4)
    steps = [
        [part.tolist() for part in numpy(mirrored, batch)]
        for batch in mirrored.experimental_distribute_dataset(dataset)
    ]
    assert steps == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], [9]]]


def test_a_replica_without_rows_gets_zero_of_them(mirrored) -> None:
    dataset = mirrored.experimental_distribute_dataset([X[:1]])
    (batch,) = dataset
    assert [part.shape for part in numpy(mirrored, batch)] == [(1, 3), (0, 3)]


def test_one_replica_gets_bare_tensors() -> None:
    strategy = ks.OneDeviceStrategy("cpu:0")
    for x, y in strategy.experimental_distribute_dataset(batches()):
        assert keras.ops.is_tensor(x)
        assert keras.ops.is_tensor(y)


def test_components_lie_on_the_replicas_devices(strategy, backend_name) -> None:
    if backend_name == "torch":
        pytest.skip("all virtual CPUs are one device to torch")
    for x, _ in distribute(strategy, "list"):
        components = strategy.experimental_local_results(x)
        where = [str(strategy.engine.device_of(part)) for part in components]
        assert where == list(strategy.extended.worker_devices)


def test_batches_may_stay_on_the_host(mirrored) -> None:
    options = ks.InputOptions(experimental_fetch_to_device=False)
    for x, _ in distribute(mirrored, "list", options=options):
        components = mirrored.experimental_local_results(x)
        assert {str(mirrored.engine.device_of(c)) for c in components} == {"cpu:0"}


@pytest.mark.parametrize("size", [0, 1, 3])
def test_buffers_of_any_size(mirrored, size) -> None:
    options = ks.InputOptions(experimental_per_replica_buffer_size=size)
    dataset = distribute(mirrored, "list", options=options)
    assert len(rows(mirrored, dataset)) == 3


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


# Iterators.


def test_ends_of_an_iterator(mirrored) -> None:
    iterator = iter(distribute(mirrored, "list"))
    assert iter(iterator) is iterator
    for _ in range(3):
        iterator.get_next()
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    with pytest.raises(ks.errors.OutOfRangeError, match="no more batches") as caught:
        iterator.get_next()
    assert isinstance(caught.value, IndexError)
    assert str(caught.value).endswith(
        "\nSee `keras-strategies explain OutOfRangeError`"
    )
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        assert isinstance(caught.value, tf.errors.OutOfRangeError)
    assert not iterator.get_next_as_optional().has_value()


def test_optional_batches(mirrored) -> None:
    iterator = iter(distribute(mirrored, "list"))
    found = []
    while (optional := iterator.get_next_as_optional()).has_value():
        found.append(optional.get_value())
    assert rows(mirrored, found) == rows(mirrored, distribute(mirrored, "list"))
    with pytest.raises(ValueError, match="has_value"):
        optional.get_value()


def test_iterators_of_one_dataset_are_independent(mirrored) -> None:
    dataset = distribute(mirrored, "tf_data")
    first, second = iter(dataset), iter(dataset)
    next(first)
    assert rows(mirrored, [next(second)]) == rows(mirrored, [next(iter(dataset))])
    first.close()
    second.close()


def test_element_spec(mirrored, kind) -> None:
    dataset = distribute(mirrored, kind)
    x, y = dataset.element_spec
    for spec, shape, dtype in ((x, (None, 3), "float32"), (y, (None,), "int32")):
        assert isinstance(spec, ks.PerReplica)
        for own in spec.values:
            assert tuple(own.shape) == shape
            assert keras.backend.standardize_dtype(own.dtype) == dtype
    assert len(rows(mirrored, dataset)) == 3
    with contextlib.closing(iter(distribute(mirrored, "list"))) as iterator:
        assert iterator.element_spec


def test_element_spec_of_one_replica_is_the_backends(backend_name) -> None:
    strategy = ks.OneDeviceStrategy("cpu:0")
    x, _ = strategy.experimental_distribute_dataset(batches()).element_spec
    if backend_name == "tensorflow":
        import tensorflow as tf

        assert x == tf.TensorSpec((None, 3), "float32")
    else:
        assert isinstance(x, keras.KerasTensor)


def test_a_dataset_without_batches_has_no_spec(mirrored) -> None:
    dataset = mirrored.experimental_distribute_dataset([])
    assert list(dataset) == []
    with pytest.raises(ks.errors.InputError, match="empty"):
        _ = dataset.element_spec


# Threads.


def input_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "ks-input"]


def test_no_thread_is_left(mirrored, kind) -> None:
    for _ in distribute(mirrored, kind):
        pass
    assert not input_threads()
    for _ in distribute(mirrored, kind):
        break
    gc.collect(1)  # Of what is this young; everything takes as long as ten such tests.
    for thread in input_threads():
        thread.join(5)
        assert not thread.is_alive()
    iterator = iter(distribute(mirrored, kind))
    next(iterator)
    iterator.close()
    assert not input_threads()
    with pytest.raises(StopIteration):
        next(iterator)


def test_an_error_of_the_source_keeps_its_type(mirrored) -> None:
    def failing():
        yield batches()[0]
        raise FileNotFoundError("part-2")

    iterator = iter(mirrored.experimental_distribute_dataset(failing()))
    next(iterator)
    with pytest.raises(FileNotFoundError, match="part-2"):
        next(iterator)
    assert not input_threads()
    with pytest.raises(StopIteration):
        next(iterator)


# Bad input.


def test_tf_data_that_is_not_batched(mirrored) -> None:
    tf = pytest.importorskip("tensorflow")
    unbatched = tf.data.Dataset.from_tensor_slices((X, Y))
    with pytest.raises(
        ks.errors.BatchError,
        match=r"not batched.*batch\[0\] of shape \(3,\), batch\[1\] of shape \(\)"
        r".*\.batch\(global_batch_size\)",
    ):
        mirrored.experimental_distribute_dataset(unbatched)


def test_array_rows_that_are_not_batched(mirrored, backend_name) -> None:
    if backend_name != "tensorflow":  # tf.data cannot tell such rows from batches.
        dataset = mirrored.make_experimental_numpy_dataset(X)
        with pytest.raises(ValueError, match=r"\.batch\(global_batch_size\)"):
            mirrored.experimental_distribute_dataset(dataset)
    dataset = mirrored.make_experimental_numpy_dataset((X, Y))
    with pytest.raises(ks.errors.BatchError, match="is not batched"):
        mirrored.experimental_distribute_dataset(dataset)


def test_an_iterable_of_scalars(mirrored) -> None:
    dataset = mirrored.experimental_distribute_dataset(range(10))
    with pytest.raises(ks.errors.BatchError, match=r"a range, is not batched"):
        next(iter(dataset))


def test_parts_of_different_lengths(mirrored) -> None:
    dataset = mirrored.experimental_distribute_dataset(
        [{"left": X[:8], "right": [Y[:7]]}]
    )
    with pytest.raises(
        ks.errors.BatchError,
        match=r"batch\['left'\] of shape \(8, 3\), batch\['right'\]\[0\] of shape"
        r" \(7,\)",
    ):
        next(iter(dataset))


def test_what_is_no_dataset(mirrored) -> None:
    with pytest.raises(ValueError, match=r"of type int\) is not a dataset"):
        mirrored.experimental_distribute_dataset(3)
    with pytest.raises(ValueError, match="is batched already"):
        mirrored.experimental_distribute_dataset(batches(), batch_size=4)
    with pytest.raises(ValueError, match="data of shape"):
        mirrored.make_experimental_numpy_dataset(np.float32(3))
    with pytest.raises(ValueError, match=r"data\[0\] of shape \(22, 3\), data\[1\]"):
        mirrored.make_experimental_numpy_dataset((X, Y[:5]))
    with pytest.raises(ValueError, match="`options` must be a"):
        mirrored.experimental_distribute_dataset(batches(), options=3)


def test_input_is_distributed_outside_of_replicas(mirrored) -> None:
    def fn():
        mirrored.experimental_distribute_dataset(batches())

    with pytest.raises(RuntimeError, match="inside a replica function"):
        mirrored.run(fn)


# From functions.


def from_function(strategy, dataset, **options):
    contexts = []

    def dataset_fn(context):
        contexts.append(context)
        return dataset

    found = strategy.distribute_datasets_from_function(
        dataset_fn, ks.InputOptions(**options)
    )
    return found, contexts


def test_a_function_is_called_once_and_its_batches_are_not_split(mirrored) -> None:
    dataset, contexts = from_function(mirrored, batches(4))
    assert contexts == [ks.InputContext(1, 0, 2)]
    assert rows(mirrored, dataset) == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9, 10, 11], [12, 13, 14, 15]],
        [[16, 17, 18, 19], [20, 21]],
    ]
    assert len(dataset) == 3
    assert len(contexts) == 1


def test_an_incomplete_round_gives_zero_rows(mirrored) -> None:
    dataset, _ = from_function(mirrored, batches(8))
    assert rows(mirrored, dataset)[-1] == [[16, 17, 18, 19, 20, 21], []]
    assert len(dataset) == 2


def test_a_dataset_for_each_replica(mirrored) -> None:
    made = iter([batches(4)[:2], batches(8)[1:]])
    dataset = mirrored.distribute_datasets_from_function(
        lambda context: next(made),
        ks.InputOptions(experimental_replication_mode="PER_REPLICA"),
    )
    steps = [[[0, 1, 2, 3], list(range(8, 16))], [[4, 5, 6, 7], list(range(16, 22))]]
    assert rows(mirrored, dataset) == steps
    with pytest.raises(ValueError, match="distribute_datasets_from_function"):
        mirrored.experimental_distribute_dataset(
            batches(), ks.InputOptions(experimental_replication_mode="PER_REPLICA")
        )


def test_datasets_of_replicas_that_end_at_different_times(mirrored) -> None:
    made = iter([batches(4)[:1], batches(4)[1:3]])
    dataset = mirrored.distribute_datasets_from_function(
        lambda context: next(made),
        ks.InputOptions(experimental_replication_mode="PER_REPLICA"),
    )
    assert rows(mirrored, dataset) == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[], [8, 9, 10, 11]],
    ]


def test_a_function_that_is_none(mirrored) -> None:
    with pytest.raises(ks.errors.InvalidTypeError, match="function of an InputContext"):
        mirrored.distribute_datasets_from_function(batches())


def test_joined_again(mirrored) -> None:
    """A distributed dataset can be distributed: its global batches are."""
    dataset, _ = from_function(mirrored, batches(4))
    again = mirrored.experimental_distribute_dataset(dataset)
    assert rows(mirrored, again) == rows(mirrored, distribute(mirrored, "list"))


# Rows of arrays.


def test_rows_of_arrays_shuffled_and_repeated(mirrored) -> None:
    dataset = mirrored.make_experimental_numpy_dataset((X, Y))
    dataset = dataset.shuffle(ROWS, seed=3).batch(8).repeat(2).prefetch(2)
    steps = rows(mirrored, mirrored.experimental_distribute_dataset(dataset))
    assert len(steps) == 6
    orders = [
        [row for step in steps[i : i + 3] for part in step for row in part]
        for i in (0, 3)
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == Y.tolist()
    assert orders[0] != orders[1]


def test_array_dataset(backend_name) -> None:
    dataset = ks.get_strategy().make_experimental_numpy_dataset(X)
    if backend_name == "tensorflow":
        import tensorflow as tf

        assert isinstance(dataset, tf.data.Dataset)
        return
    assert len(dataset) == ROWS
    assert [b.shape[0] for b in dataset.batch(8)] == [8, 8, 6]
    assert [b.shape[0] for b in dataset.batch(8, drop_remainder=True)] == [8, 8]
    assert dataset.repeat().cardinality() is None
    with pytest.raises(ks.errors.InvalidTypeError, match="call `repeat` with a number"):
        len(dataset.repeat())
    assert dataset.batch(8).repeat(-1).cardinality() is None
    assert dataset.batch(8).repeat(3).cardinality() == 9
    np.testing.assert_array_equal(next(iter(dataset)), X[0])
    with pytest.raises(ValueError, match="`batch` once"):
        dataset.batch(8).batch(8)
    with pytest.raises(ValueError, match="1 or more"):
        dataset.batch(0)

    keras.utils.set_random_seed(1)
    first = np.concatenate(list(dataset.shuffle().batch(8)))
    keras.utils.set_random_seed(1)
    second = np.concatenate(list(dataset.shuffle().batch(8)))
    np.testing.assert_array_equal(first, second)


# The default strategy.


def test_the_default_strategy_passes_datasets_through() -> None:
    default = ks.get_strategy()
    for make in (batches, tf_data, loader, Restarting):
        given = make()
        assert default.experimental_distribute_dataset(given) is given
        assert default.distribute_datasets_from_function(lambda _, g=given: g) is given


@pytest.mark.parametrize("kind", ["py_dataset", "arrays", "frames"])
def test_the_default_strategy_makes_batches_of_what_has_none(kind) -> None:
    default = ks.get_strategy()
    found = rows(default, distribute(default, kind))
    assert [len(part) for (part,) in found] == [8, 8, 6]


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_dataset_that_is_placed_on_the_replicas_device(
    mirrored, ahead, backend_name
) -> None:
    if backend_name == "torch":
        pytest.skip("all virtual CPUs are one device to torch")
    made_on = []

    def dataset_fn(context):
        offset = keras.ops.ones((2, 3))
        made_on.append(str(mirrored.engine.device_of(offset)))

        class Batches:
            def __iter__(self):
                for i in range(2):
                    batch = keras.ops.ones((2, 3)) * i
                    made_on.append(str(mirrored.engine.device_of(batch)))
                    yield batch + offset

        return Batches()

    options = ks.InputOptions(
        experimental_replication_mode="PER_REPLICA",
        experimental_place_dataset_on_device=True,
        experimental_fetch_to_device=False,
        experimental_per_replica_buffer_size=ahead,
    )
    dataset = mirrored.distribute_datasets_from_function(dataset_fn, options)
    assert made_on == ["cpu:0", "cpu:1"]
    for i, batch in enumerate(dataset):
        for part in numpy(mirrored, batch):
            assert part.tolist() == [[1 + i] * 3] * 2
        devices = [str(mirrored.engine.device_of(part)) for part in batch.values]
        assert devices == ["cpu:0", "cpu:1"]
    assert made_on[2:] == ["cpu:0", "cpu:1"] * 2


@pytest.mark.parametrize("kind", ["text", "objects", "tf.data text", "ragged"])
def test_text_and_ragged_rows_are_for_tensorflow_alone(mirrored, backend_name, kind):
    tf = pytest.importorskip("tensorflow")
    text, numbers = np.array(["a", "b", "c", "d"]), np.ones((4, 2), "float32")
    datasets = {
        "text": [{"x": numbers, "word": text}],
        "objects": [{"x": numbers, "word": text.astype(object)}],
        "tf.data text": tf.data.Dataset.from_tensors({"x": numbers, "word": text}),
        "ragged": tf.data.Dataset.from_tensors(
            {"word": tf.ragged.constant([[1.0, 2.0], [3.0], [], [4.0]])}
        ),
    }
    if backend_name == "tensorflow":
        batches = list(mirrored.experimental_distribute_dataset(datasets[kind]))
        assert len(batches) == 1
        return
    with pytest.raises(ValueError, match=r"batch\['word'\] of .*KERAS_BACKEND"):
        list(mirrored.experimental_distribute_dataset(datasets[kind]))


# Values without rows, from a function. What `tf.distribute` gives stands beside each.


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


def test_structures_of_values_with_different_axes(mirrored) -> None:
    def dataset_fn(context):
        del context
        rows = np.arange(12, dtype="int32").reshape(4, 3)
        return [{"n": np.int32(i), "row": rows[i]} for i in range(4)]

    options = ks.InputOptions(experimental_replication_mode="PER_REPLICA")
    for given, expected in ((None, [[0, 1], [2, 3]]), (options, [[0, 0], [1, 1]])):
        dataset = mirrored.distribute_datasets_from_function(dataset_fn, given)
        steps = list(dataset)[:2]
        found = [
            [int(part["n"]) for part in mirrored.experimental_local_results(step)]
            for step in steps
        ]
        assert found == expected  # There: the same.
        [_, second] = mirrored.experimental_local_results(steps[0])
        row = keras.ops.convert_to_numpy(second["row"]).tolist()
        assert row == [3 * expected[0][1] + i for i in range(3)]


def test_one_replica_takes_every_value() -> None:
    strategy = ks.OneDeviceStrategy("cpu:0")
    dataset = strategy.distribute_datasets_from_function(lambda _: scalars("list", 3))
    assert [int(step) for step in dataset] == [0, 1, 2]  # There: the same.


def test_models_train_on_rows_not_on_values(mirrored) -> None:
    with mirrored.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    dataset = mirrored.distribute_datasets_from_function(lambda _: scalars("list", 4))
    with pytest.raises(ValueError, match=r"is not batched: it yielded batch of shape"):
        model.fit(dataset, verbose=0)


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
    assert seen
    assert set(seen) == {None}
