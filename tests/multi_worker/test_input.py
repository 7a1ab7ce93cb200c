"""Input of several workers: each row once, in the global batches of one device."""

from __future__ import annotations

import itertools
import logging

import keras
import numpy as np
import pytest
from harness.training import assert_same

import keras_strategies as ks

pytestmark = pytest.mark.one_backend

ALL = pytest.mark.parametrize(
    "cluster", ["two", "three", "two_by_two"], indirect=True, scope="session"
)


def make_model(strategy):
    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def rows(count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 2)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def summary(model, history):
    return {
        "history": {k: np.asarray(v) for k, v in history.history.items()},
        "weights": {i: np.asarray(w) for i, w in enumerate(model.get_weights())},
    }


def on_one_device(batches, epochs=2):
    """What one device computes on these global batches."""
    model = make_model(ks.OneDeviceStrategy("cpu:0"))
    source = [tuple(batch) for batch in batches] * epochs
    history = model.fit(
        (batch for batch in source),
        epochs=epochs,
        steps_per_epoch=len(batches),
        verbose=0,
    )
    return summary(model, history)


def creator(strategy, counts):
    """Each worker has so many rows of its own, in batches of its own."""

    def dataset_fn(context):
        assert context.num_input_pipelines == strategy.workers.group.count
        worker = context.input_pipeline_id
        x, y = rows(sum(counts))
        start = sum(counts[:worker])
        stop = start + counts[worker]
        x, y = x[start:stop], y[start:stop]
        return [(x[i : i + 4], y[i : i + 4]) for i in range(0, len(x), 4)]

    class Anew:
        """A dataset that starts again in each epoch."""

        def __init__(self, batches):
            self._batches = batches

        def __iter__(self):
            return iter(self._batches)

    model = make_model(strategy)
    data = ks.DatasetCreator(lambda context: Anew(dataset_fn(context)))
    return summary(model, model.fit(data, epochs=2, verbose=0))


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["two", "two_by_two"])
@ALL
def test_workers_with_different_amounts_of_data_stay_in_step(cluster):
    workers = 2 if cluster.replicas != 3 else 3
    counts = [11, 5, 2][:workers]
    x, y = rows(sum(counts))
    batches = []
    for step in range(3):
        parts = []
        for worker, count in enumerate(counts):
            begin = sum(counts[:worker])
            own = slice(begin + 4 * step, min(begin + 4 * step + 4, begin + count))
            parts.append((x[own], y[own]))
        joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
        batches.append(joined)
    expected = on_one_device(batches)
    for index, found in enumerate(cluster(creator, counts)):
        assert_same(expected, found, 1e-5, f"worker {index}")


WIDE = 2048


def of_wide_rows(strategy, counts, steps):
    """Each worker has so many wide rows in each of three batches of its own."""
    batches = [
        (np.ones((rows, WIDE), "float32"), np.ones((rows, 1))) for rows in counts
    ]

    def dataset_fn(context):
        start = np.arange(WIDE, dtype="float32") / WIDE + context.input_pipeline_id
        x, y = batches[context.input_pipeline_id]
        return [(x * start * step, y) for step in range(1, 4)]

    keras.utils.set_random_seed(5)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDE,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-5), "mse", steps_per_execution=steps)
    sent, group = [0], strategy.workers.group
    gather = group.gather

    def counted(what, payload, *args, **kwargs):
        sent[0] += len(payload)
        return gather(what, payload, *args, **kwargs)

    group.gather = counted
    joins, handler = [], logging.Handler()
    handler.emit = joins.append
    logger = logging.getLogger("keras_strategies.row_parts")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        history = model.fit(
            strategy.distribute_datasets_from_function(dataset_fn), verbose=0
        )
    finally:
        del group.gather
        logger.removeHandler(handler)
    return summary(model, history), sent[0], [join.getMessage() for join in joins]


@pytest.mark.nightly(unless=["two-counts0-1", "two-counts1-3"])
@pytest.mark.parametrize(("counts", "steps"), [([4, 4], 1), ([4, 4], 3), ([3, 6], 1)])
def test_separate_batches_stay_on_their_workers(cluster, counts, steps):
    def alone():
        batches = []
        for step in range(1, 4):
            x = np.concatenate(
                [
                    np.ones((rows, WIDE), "float32")
                    * (np.arange(WIDE, dtype="float32") / WIDE + worker)
                    * step
                    for worker, rows in enumerate(counts)
                ]
            )
            batches.append((x, np.ones((sum(counts), 1))))
        keras.utils.set_random_seed(5)
        with ks.OneDeviceStrategy("cpu:0").scope():
            model = keras.Sequential([keras.Input((WIDE,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(1e-5), "mse")
        source = (batch for batch in batches)
        return summary(model, model.fit(source, steps_per_epoch=3, verbose=0))

    expected = alone()
    every = cluster(of_wide_rows, counts, steps)
    for index, (found, sent, joins) in enumerate(every):
        assert_same(expected, found, 1e-5, f"worker {index}")
        # The rows of one batch have more.
        assert sent < 4 * 4 * WIDE
        assert not joins


def test_separate_batches_of_other_shapes_are_an_error(cluster):
    def program(strategy):
        def dataset_fn(context):
            width = 2 + context.input_pipeline_id
            return [(np.ones((4, width), "float32"), np.ones((4, 1), "float32"))]

        try:
            make_model(strategy).fit(
                strategy.distribute_datasets_from_function(dataset_fn), verbose=0
            )
        except ValueError as error:
            return str(error)
        return ""

    for text in cluster(program):
        assert "shape" in text


def test_files_are_divided_and_each_row_is_read_once(cluster, tmp_path):
    import tensorflow as tf

    files = []
    for number, count in enumerate([3, 4, 5, 6]):
        files.append(str(tmp_path / f"{number}.txt"))
        lines = [f"{10 * number + i}" for i in range(count)]
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))

    def program(strategy, files, policy):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = getattr(
            tf.data.experimental.AutoShardPolicy, policy
        )

        def parse(line):
            return tf.strings.to_number(tf.reshape(line, (-1,)))

        dataset = tf.data.TextLineDataset(files).batch(4).map(parse)
        distributed = strategy.experimental_distribute_dataset(
            dataset.with_options(options)
        )
        return [
            [
                value
                for part in strategy.experimental_local_results(batch)
                for value in np.asarray(keras.ops.convert_to_numpy(part)).tolist()
            ]
            for batch in distributed
        ]

    every = sorted(
        10 * n + i for n, count in enumerate([3, 4, 5, 6]) for i in range(count)
    )
    for policy in ("AUTO", "FILE", "DATA"):
        found = cluster(program, files, policy)
        assert len({len(batches) for batches in found}) == 1, "not in step"
        read = [list(itertools.chain(*batches)) for batches in found]
        assert sorted(itertools.chain(*read)) == every
        if policy == "DATA":
            # The global batches of one device: 18 rows in batches of 4.
            joined = [a + b for a, b in zip(*found, strict=True)]
            assert [len(batch) for batch in joined] == [4, 4, 4, 4, 2]
        else:
            assert {value // 10 for value in read[0]} == {0, 2}
            assert {value // 10 for value in read[1]} == {1, 3}


@pytest.mark.slow(seconds=7)
def test_fit_reads_files_of_its_own(cluster, tmp_path):
    import tensorflow as tf

    x, y = rows(12)
    files = []
    for number in range(2):
        files.append(str(tmp_path / f"{number}.tfrecord"))
        with tf.io.TFRecordWriter(files[-1]) as writer:
            for i in range(6 * number, 6 * number + 6):
                writer.write(np.concatenate([x[i], y[i]]).tobytes())

    def program(strategy, files):
        def parse(records):
            found = tf.reshape(tf.io.decode_raw(records, tf.float32), (-1, 3))
            return found[:, :2], found[:, 2:]

        model = make_model(strategy)
        dataset = tf.data.TFRecordDataset(files).batch(4).map(parse)
        return summary(model, model.fit(dataset, epochs=2, verbose=0))

    # Two rows of each file in a batch.
    batches = [
        [np.concatenate([a[i : i + 2], a[6 + i : 8 + i]]) for a in (x, y)]
        for i in range(0, 6, 2)
    ]
    expected = on_one_device(batches)
    for index, found in enumerate(cluster(program, files)):
        assert_same(expected, found, 1e-5, f"worker {index}")


def test_datasets_from_a_function_are_not_divided_again(cluster):
    def program(strategy):
        def dataset_fn(context):
            first = 10 * context.input_pipeline_id
            return [
                np.arange(first, first + 2, dtype="float32")
                for _ in range(3 if context.input_pipeline_id == 0 else 1)
            ]

        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        found = []
        for batch in dataset:
            total = strategy.reduce("SUM", batch, axis=0)
            found.append(float(np.asarray(keras.ops.convert_to_numpy(total))))
        return found

    # The second worker goes on without rows.
    assert cluster(program) == [[22, 1, 1], [22, 1, 1]]


def of_shards(strategy, shards):
    """How often training has seen each row of a stream."""
    import torch

    class Stream(torch.utils.data.IterableDataset):
        """Shards of five rows, of which a node takes those of `split_by_node`."""

        def __init__(self, node, nodes):
            self.node, self.nodes = node, nodes

        def __iter__(self):
            if shards % self.nodes == 0:
                own = range(self.node, shards, self.nodes)
                rows = (5 * shard + i for shard in own for i in range(5))
            else:
                # Hugging Face's `split_dataset_by_node` takes one row of each group.
                rows = iter(range(self.node, 5 * shards, self.nodes))
            for row in rows:
                yield np.eye(5 * shards, dtype="float32")[row], np.zeros(1, "float32")

    def dataset_fn(context):
        stream = Stream(context.input_pipeline_id, context.num_input_pipelines)
        return torch.utils.data.DataLoader(stream, batch_size=2)

    with strategy.scope():
        inputs = keras.Input((5 * shards,))
        # Row i adds 1 to weight i, and to no other.
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Model(inputs, dense(inputs))
        model.compile(keras.optimizers.SGD(1.0), _negative_sum)
    model.fit(ks.DatasetCreator(dataset_fn), epochs=2, verbose=0)
    return np.asarray(model.get_weights()[0])[:, 0]


def _negative_sum(y, found):
    return -keras.ops.sum(found)


@pytest.mark.one_backend
@pytest.mark.nightly(unless=["3-two"])
@pytest.mark.parametrize("cluster", ["two", "three"], indirect=True, scope="session")
@pytest.mark.parametrize("shards", [3, 4])
def test_each_row_of_a_stream_is_read_once_if_shards_do_not_divide(cluster, shards):
    for seen in cluster(of_shards, shards):
        np.testing.assert_array_equal(seen, np.full(5 * shards, 2.0))


def of_mapped_elements(strategy, count):
    """A worker divides the elements of a pipeline before their `map`."""
    tf = pytest.importorskip("tensorflow", reason="not installed")
    x, y = rows(count)
    read = []

    def row(number):
        read.append(int(number))
        return x[number], y[number]

    def dataset_fn(context):
        pipelines = context.num_input_pipelines
        numbers = tf.data.Dataset.range(count).shuffle(count, seed=1)
        own = numbers.shard(pipelines, context.input_pipeline_id)
        own = own.map(lambda n: tf.numpy_function(row, [n], [tf.float32, tf.float32]))
        own = own.map(lambda *row: (tf.ensure_shape(row[0], 2), row[1]))
        return own.map(lambda x, y: (x, tf.ensure_shape(y, 1))).batch(6 // pipelines)

    model = make_model(strategy)
    history = model.fit(ks.DatasetCreator(dataset_fn), epochs=2, verbose=0)
    return summary(model, history), read


@pytest.mark.nightly(unless=["two"])
@pytest.mark.parametrize("cluster", ["two", "three"], indirect=True, scope="session")
def test_elements_that_are_divided_before_a_map_are_read_once(cluster):
    count = 20
    expected, read = of_mapped_elements(ks.OneDeviceStrategy("cpu:0"), count)
    found = cluster(of_mapped_elements, count)
    assert sorted(n for _, own in found for n in own) == sorted(read)
    assert max(len(own) for _, own in found) < len(read) / len(found) + 2
    for worker, (numbers, _) in enumerate(found):
        assert_same(expected, numbers, 1e-5, f"worker {worker}")


class Batches(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("rows", "worker 1 has"),
        ("contents", "different contents"),
        ("end", "All workers must make the same calls"),
    ],
)
def test_batches_that_differ_are_an_error_at_once(cluster, problem, message):
    def program(strategy, problem):
        x, y = rows(8)
        other = strategy.workers.group.index == 1
        batches = [(x[:4], y[:4]), (x[4:], y[4:])]
        if other:
            batches = {
                "rows": [(x[:3], y[:3]), (x[4:], y[4:])],
                "contents": [(x[1:5], y[1:5]), (x[4:], y[4:])],
                "end": batches[:1],
            }[problem]
        model = make_model(strategy)
        steps = {"steps_per_epoch": 2} if problem == "end" else {}
        source = (b for b in batches) if problem == "end" else batches_of(batches)
        try:
            model.fit(source, verbose=0, **steps)
        except (ks.errors.WorkerError, ks.errors.ClusterError) as error:
            return str(error)
        return "no error"

    def batches_of(batches):
        return Batches(batches)

    first, second = cluster(program, problem)
    assert message in first + second
    assert "no error" not in (first, second)
    if problem == "contents":
        assert "first in `x`. All workers must read the same global batches" in first


def test_another_number_of_rows_is_an_error_before_the_first_step(cluster):
    def program(strategy):
        x, y = rows(8 + strategy.workers.group.index)
        try:
            make_model(strategy).fit(x, y, batch_size=4, verbose=0)
        except ks.errors.ClusterError as error:
            return str(error)
        return None

    for text in cluster(program):
        assert "the rows of `x`: worker 0 has 8, worker 1 has 9" in text


@pytest.mark.parametrize("place", ["x", "y", "sample_weight"])
@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_other_values_of_arrays_are_an_error_that_names_them(cluster, method, place):
    def program(strategy, method, place):
        index = strategy.workers.group.index
        x, y = rows(40)
        given = {"x": x, "y": y, "sample_weight": np.ones(40, "float32")}
        # Only the last row.
        given[place][-1:] += index
        model = make_model(strategy)
        try:
            getattr(model, method)(**given, batch_size=8, verbose=0)
        except ks.errors.ClusterError as error:
            return str(error), int(model.optimizer.iterations)
        return "no error", -1

    for text, steps in cluster(program, method, place):
        assert f"Workers have different data for `{method}`" in text
        assert f"values of `{place}` differ between worker 0 and worker 1" in text
        # The first thing to check.
        assert "Check first that there is a seed: call `keras.utils.set_random" in text
        assert steps == 0


def test_other_values_in_dicts_frames_and_loaders_are_named(cluster):
    def program(strategy):
        pandas = pytest.importorskip("pandas")
        torch = pytest.importorskip("torch")
        index = strategy.workers.group.index
        inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((2,), name="b")}
        with strategy.scope():
            output = keras.layers.Dense(1)(keras.layers.Add()([*inputs.values()]))
            model = keras.Model(inputs, output)
            model.compile("sgd", "mse")
        x, y = rows(24)

        def error(model, *given, **more):
            try:
                model.predict(*given, verbose=0, **more)
            except ks.errors.ClusterError as error:
                return str(error)
            return "no error"

        plain = make_model(strategy)
        tensors = torch.from_numpy(x + index).to(torch.bfloat16), torch.from_numpy(y)
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*tensors), batch_size=8
        )
        return [
            error(model, {"a": x, "b": x + index}, batch_size=8),
            error(plain, pandas.DataFrame(x + index), batch_size=8),
            error(plain, loader),
            # Equal data, of a type that NumPy lacks.
            error(plain, torch.from_numpy(x).to(torch.bfloat16).float()),
        ]

    for named, frame, loader, equal in cluster(program):
        assert "the values of `x['b']` differ between worker 0 and worker 1" in named
        assert "the values of `x` differ" in frame
        assert "the values of `x[0]` differ" in loader
        assert equal == "no error"


def test_another_model_is_an_error_before_the_first_step(cluster):
    def program(strategy):
        units = 1 + strategy.workers.group.index
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
            model.compile("sgd", "mse")
        try:
            model.fit(*rows(8), verbose=0)
        except ks.errors.ClusterError as error:
            return str(error)
        return None

    for text in cluster(program):
        assert "the model's variables" in text and "worker 1" in text


def test_shuffled_batches_are_the_same_without_a_seed(cluster):
    def program(strategy):
        import random

        index = strategy.workers.group.index
        # Workers with different random numbers.
        random.seed(index)
        keras.utils.set_random_seed(index)
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        history = model.fit(*rows(20), batch_size=4, epochs=2, verbose=0)
        return summary(model, history)

    first, second = cluster(program)
    assert_same(first, second, 0.0, "worker 1 beside worker 0")


def streamed(strategy, group, kind):
    """One pass over input that can be read once, with groups of steps."""
    from harness import streams

    def made():
        with strategy.scope():
            return streams.model(group, is_built=False)

    trained = made()
    history = trained.fit(
        streams.STREAMS[kind](),
        validation_data=streams.STREAMS[kind](),
        shuffle=False,
        verbose=0,
    ).history
    limited = made()
    limits = {"steps_per_epoch": 3, "epochs": 2, "shuffle": False, "verbose": 0}
    parts = limited.fit(streams.STREAMS[kind](), **limits).history
    evaluated = made().evaluate(streams.STREAMS[kind](), verbose=0)
    return {
        "losses": [*history["loss"], *history["val_loss"], evaluated],
        "limited": parts["loss"],
        "steps": [streams.steps(trained), streams.steps(limited)],
    }


@pytest.mark.parametrize("cluster", ["two", "two_by_two"], indirect=True)
def test_groups_of_steps_read_every_batch_of_a_stream_once(cluster):
    from harness import streams

    for group, kind in ((1, "generator"), (3, "generator"), (4, "generator")):
        for found in cluster(streamed, group, kind):
            np.testing.assert_allclose(found["losses"], [streams.LOSS] * 3, rtol=1e-5)
            assert found["steps"] == [6, 6], group
            if group <= 3:
                # The batches 0, 1, 2 and 3, 4, 5.
                np.testing.assert_allclose(found["limited"], [5 / 3, 50 / 3], rtol=1e-5)


@pytest.mark.parametrize("cluster", ["two_by_two"], indirect=True)
def test_batches_are_prepared_ahead(cluster):
    """As on accelerators; also those that workers exchange when they are read."""

    def program(strategy):
        from harness.batches_ahead import prepare_ahead

        end = prepare_ahead(strategy)
        try:
            model = make_model(strategy)
            arguments = {"epochs": 2, "verbose": 0, "shuffle": True}
            found = summary(model, model.fit(*rows(22), batch_size=5, **arguments))
            separate = creator(strategy, [11, 5])
        finally:
            end()
        return {"shuffled": found, "separate": separate}

    def alone():
        model = make_model(ks.OneDeviceStrategy("cpu:0"))
        arguments = {"epochs": 2, "verbose": 0, "shuffle": True}
        return summary(model, model.fit(*rows(22), batch_size=5, **arguments))

    expected = {"shuffled": alone(), "separate": cluster(creator, [11, 5])[0]}
    for index, found in enumerate(cluster(program)):
        assert_same(expected, found, 1e-5, f"worker {index}")
