"""Input of several workers: each row once, in the global batches of one device."""

from __future__ import annotations

import itertools
import random
import re

import keras
import numpy as np
import pytest
from harness import streams
from harness.batches_ahead import prepare_ahead
from harness.training import assert_same, assert_workers, numbers
from multi_worker.clusters import ALL, dense, logged, on_clusters, one_device

import keras_strategies as ks

pytestmark = pytest.mark.one_backend


def make_model(strategy, several=1, units=1):
    options = {"metrics": ["mae"], "steps_per_execution": several}
    return dense(
        *(strategy, 2, lambda: [keras.layers.Dense(units)]),
        lambda: keras.optimizers.SGD(0.05),
        **options,
    )


def rows(count):
    rng = np.random.default_rng(count)
    x = rng.normal(size=(count, 2)).astype("float32")
    return x, x.sum(axis=1, keepdims=True)


def on_one_device(batches, epochs=2):
    """What one device computes on these global batches."""
    model = make_model(one_device())
    source = (tuple(batch) for batch in batches * epochs)
    steps = {"epochs": epochs, "steps_per_epoch": len(batches)}
    return numbers(model, model.fit(source, **steps, verbose=0))


class Batches(keras.utils.PyDataset):
    def __init__(self, batches):
        super().__init__()
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __getitem__(self, index):
        return self._batches[index]


def creator(strategy, counts, several=1):
    """Each worker has so many rows of its own, in batches of its own."""

    def dataset_fn(context):
        assert context.num_input_pipelines == strategy.workers.group.count
        start = sum(counts[: context.input_pipeline_id])
        stop = start + counts[context.input_pipeline_id]
        x, y = rows(sum(counts))
        pieces = [slice(i, min(i + 4, stop)) for i in range(start, stop, 4)]

        class Anew:
            """A dataset that starts again in each epoch."""

            def __iter__(self):
                return iter([(x[own], y[own]) for own in pieces])

        return Anew()

    model = make_model(strategy, several)
    data = ks.DatasetCreator(dataset_fn)
    return numbers(model, model.fit(data, epochs=2, verbose=0))


@pytest.mark.one_backend("torch")
@pytest.mark.nightly(unless=["1-two", "3-two", "1-two_by_two"])
@ALL
@pytest.mark.parametrize("several", [1, 3])
def test_workers_with_different_amounts_of_data_stay_in_step(cluster, several):
    counts = [11, 5, 2][: cluster.pool.workers]
    x, y = rows(sum(counts))
    own = np.split(np.arange(len(x)), np.cumsum(counts)[:-1])
    steps = [np.concatenate([each[i : i + 4] for each in own]) for i in (0, 4, 8)]
    batches = [(x[taken], y[taken]) for taken in steps]
    expected = on_one_device(batches)
    assert_workers(expected, cluster(creator, counts, several))


def with_policy(dataset, policy):
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    return dataset.with_options(options)


def local_rows(strategy, batch):
    """The numbers in the batches of this worker's replicas."""
    parts = map(keras.ops.convert_to_numpy, strategy.experimental_local_results(batch))
    return [value for part in parts for value in np.ravel(part).tolist()]


def test_files_are_divided_and_each_row_is_read_once(cluster, tmp_path):
    files = []
    for number, count in enumerate([3, 4, 5, 6]):
        files.append(str(tmp_path / f"{number}.txt"))
        lines = [f"{10 * number + i}" for i in range(count)]
        (tmp_path / f"{number}.txt").write_text("\n".join(lines))

    def program(strategy, policy):
        import tensorflow as tf

        def parse(line):
            return tf.strings.to_number(tf.reshape(line, (-1,)))

        lines = with_policy(tf.data.TextLineDataset(files).batch(4).map(parse), policy)
        dataset = strategy.experimental_distribute_dataset(lines)
        return [local_rows(strategy, batch) for batch in dataset]

    every = [10 * n + i for n, count in enumerate([3, 4, 5, 6]) for i in range(count)]
    for policy in ("AUTO", "FILE", "DATA"):
        found = cluster(program, policy)
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


def read_by(strategy, policy, are_devices=False):
    """The positions that a worker reads, the entries of its replicas, what is said.

    The workers may be processes of one `MirroredStrategy`.
    """
    import tensorflow as tf

    if are_devices:
        strategy.workers.are_device_processes = True
    read = []

    def row(position):
        read.append(int(position))
        return np.float32(position)

    hint = tf.data.experimental.SHARD_HINT
    positions = tf.data.Dataset.range(10)
    if policy == "HINT":
        positions = positions.shard(hint, hint)
    mapped = positions.map(lambda i: tf.numpy_function(row, [i], tf.float32))
    batches = mapped.map(lambda x: tf.reshape(x, (1,))).batch(4)
    batches = with_policy(batches, policy)
    with logged() as said:
        distributed = strategy.experimental_distribute_dataset(batches)
        strategy.experimental_distribute_dataset(batches)
    seen = [value for batch in distributed for value in local_rows(strategy, batch)]
    if are_devices:
        strategy.workers.are_device_processes = False
    return read, seen, said


def test_a_hint_divides_what_is_mapped(cluster):
    alone = ks.MirroredStrategy(["cpu:0", "cpu:1"], processes=False)
    for found in (
        [read_by(alone, "HINT")],
        cluster(read_by, "HINT"),
        cluster(read_by, "HINT", True),
    ):
        for worker, (read, seen, said) in enumerate(found):
            assert sorted(read) == sorted(seen) == [*range(worker, 10, len(found))]
            assert not said


def test_a_pipeline_that_calls_functions_for_all_rows_is_named(cluster):
    [*_, said] = read_by(one_device(), "AUTO")
    assert not said
    for policy, warnings in (("AUTO", 1), ("DATA", 0)):
        for read, seen, said in cluster(read_by, policy):
            assert sorted(read) == [*range(10)] and len(seen) == 5
            assert len(said) == warnings
            assert all("2 times the work of one device" in text for text in said)


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
        return numbers(model, model.fit(dataset, epochs=2, verbose=0))

    # Two rows of each file in a batch.
    batches = [
        [np.concatenate([a[i : i + 2], a[6 + i : 8 + i]]) for a in (x, y)]
        for i in range(0, 6, 2)
    ]
    assert_workers(on_one_device(batches), cluster(program, files))


def test_datasets_from_a_function_are_not_divided_again(cluster):
    def program(strategy):
        def dataset_fn(context):
            first = 10 * context.input_pipeline_id
            batch = np.arange(first, first + 2, dtype="float32")
            return [batch] * (1 if context.input_pipeline_id else 3)

        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        return [float(strategy.reduce("SUM", batch, axis=0)) for batch in dataset]

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
@on_clusters("two", "three")
@pytest.mark.parametrize("shards", [3, 4])
def test_each_row_of_a_stream_is_read_once_if_shards_do_not_divide(cluster, shards):
    for seen in cluster(of_shards, shards):
        np.testing.assert_array_equal(seen, np.full(5 * shards, 2.0))


# Input that differs: the model, what it is given, and the error of every worker.


def arrays_with_another_row(place):
    def given(strategy, index):
        x, y = rows(40)
        arrays = {"x": x, "y": y, "sample_weight": np.ones(40, "float32")}
        arrays[place][-1:] += index  # Only the last row.
        return {**arrays, "batch_size": 8}

    return given


def batches_with(other, is_stream=False):
    def given(strategy, index):
        x, y = rows(8)
        batches = [(x[:4], y[:4]), (x[4:], y[4:])]
        if index:
            batches = other(x, y, batches)
        if is_stream:
            return {"x": (batch for batch in batches), "steps_per_epoch": 2}
        return {"x": Batches(batches)}

    return given


def separate_batches_of_other_shapes(strategy, index):
    def dataset_fn(context):
        width = 2 + context.input_pipeline_id
        return [(np.ones((4, width), "float32"), np.ones((4, 1), "float32"))]

    return {"x": strategy.distribute_datasets_from_function(dataset_fn)}


def another_frame(strategy, index):
    pandas = pytest.importorskip("pandas")
    x, y = rows(24)
    return {"x": pandas.DataFrame(x + index), "y": y}


def another_loader(strategy, index):
    import torch

    x, y = map(torch.from_numpy, rows(24))
    pairs = torch.utils.data.TensorDataset((x + index).to(torch.bfloat16), y)
    return {"x": torch.utils.data.DataLoader(pairs, batch_size=8)}


VALUES = "Workers have different data for `fit`.*values of `{}` differ between worker 0"
DIFFERENT = {
    "x": (arrays_with_another_row("x"), VALUES.format("x")),
    "y": (arrays_with_another_row("y"), VALUES.format("y")),
    "weights": (
        arrays_with_another_row("sample_weight"),
        VALUES.format("sample_weight") + ".*`keras.utils.set_random",
    ),
    "frame": (another_frame, "values of `x` differ"),
    "loader": (another_loader, r"values of `x\[0\]` differ"),
    "number of rows": (
        lambda strategy, index: dict(zip("xy", rows(8 + index), strict=True)),
        "the rows of `x`: worker 0 has 8, worker 1 has 9",
    ),
    "model": (
        lambda *_: dict(zip("xy", rows(8), strict=True)),
        "the model's variables.*worker 1",
    ),
    "rows of a batch": (
        batches_with(lambda x, y, own: [(x[:3], y[:3]), *own[1:]]),
        "worker 1 has",
    ),
    "contents of a batch": (
        batches_with(lambda x, y, own: [(x[1:5], y[1:5]), *own[1:]]),
        "different contents.*first in `x`. All workers must read the same global",
    ),
    "end": (
        batches_with(lambda x, y, own: own[:1], is_stream=True),
        "All workers must (make the same calls|read the same global batches)",
    ),
    "shapes of separate batches": (separate_batches_of_other_shapes, "shape"),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_input_that_differs_is_an_error_of_every_worker(cluster, kind):
    given, message = DIFFERENT[kind]

    def program(strategy):
        index = strategy.workers.group.index
        model = make_model(strategy, units=1 + index if kind == "model" else 1)
        errors = (ks.errors.WorkerError, ks.errors.ClusterError, ValueError)
        with pytest.raises(errors) as caught:
            model.fit(**given(strategy, index), verbose=0)
        return str(caught.value), int(model.optimizer.iterations)

    (first, steps), (second, others_steps) = cluster(program)
    assert re.search(message, first + second, re.DOTALL), (first, second)
    # Arrays are compared before the first step.
    assert "batch" in kind or kind == "end" or steps == others_steps == 0


def test_evaluate_and_predict_name_other_values(cluster):
    def program(strategy):
        index = strategy.workers.group.index
        inputs = {"a": keras.Input((2,), name="a"), "b": keras.Input((2,), name="b")}
        with strategy.scope():
            output = keras.layers.Dense(1)(keras.layers.Add()([*inputs.values()]))
            model = keras.Model(inputs, output)
            model.compile("sgd", "mse")
        x, y = rows(24)
        given = {"a": x, "b": x + index}
        for call in (model.evaluate, lambda x, y, **more: model.predict(x, **more)):
            text = r"the values of `x\['b'\]` differ between worker 0 and worker 1"
            with pytest.raises(ks.errors.ClusterError, match=text):
                call(given, y, batch_size=8, verbose=0)
        return make_model(strategy).predict(x, verbose=0)

    first, second = cluster(program)
    np.testing.assert_array_equal(first, second)


def test_shuffled_batches_are_the_same_without_a_seed(cluster):
    def program(strategy):
        model = make_model(strategy)
        # Workers with different random numbers.
        random.seed(strategy.workers.group.index)
        keras.utils.set_random_seed(strategy.workers.group.index)
        return numbers(model, model.fit(*rows(20), batch_size=4, epochs=2, verbose=0))

    first, second = cluster(program)
    assert_same(first, second, 0.0, "worker 1 beside worker 0")


def streamed(strategy, group):
    """One pass over input that can be read once, with groups of steps."""

    def made():
        with strategy.scope():
            return streams.model(group, is_built=False)

    trained, limited = made(), made()
    stream = streams.STREAMS["generator"]
    options = {"shuffle": False, "verbose": 0}
    history = trained.fit(stream(), validation_data=stream(), **options).history
    parts = limited.fit(stream(), steps_per_epoch=3, epochs=2, **options).history
    evaluated = made().evaluate(stream(), verbose=0)
    continued, source = made(), stream()
    # `tf.data` reads a generator ahead, without a strategy, too.
    fits = range(0 if keras.backend.backend() == "tensorflow" else 2)
    twice = [continued.fit(source, steps_per_epoch=3, **options) for _ in fits]
    return {
        "twice": [each.history["loss"][0] for each in twice],
        "losses": [*history["loss"], *history["val_loss"], evaluated],
        "limited": parts["loss"],
        "steps": [streams.steps(trained), streams.steps(limited)],
    }


@on_clusters("two", "two_by_two")
def test_groups_of_steps_read_every_batch_of_a_stream_once(cluster):
    for group in (1, 3, 4):
        for found in cluster(streamed, group):
            np.testing.assert_allclose(found["losses"], [streams.LOSS] * 3, rtol=1e-5)
            assert found["steps"] == [6, 6], group
            # The batches 0, 1, 2 and 3, 4, 5.
            both = [found["limited"], found["twice"] or found["limited"]]
            for losses in both if group <= 3 else ():
                np.testing.assert_allclose(losses, [5 / 3, 50 / 3], rtol=1e-5)


def shuffled(strategy):
    model = make_model(strategy)
    options = {"batch_size": 5, "epochs": 2, "verbose": 0, "shuffle": True}
    return numbers(model, model.fit(*rows(22), **options))


@on_clusters("two_by_two")
def test_batches_are_prepared_ahead(cluster):
    """As on accelerators; also those that workers exchange when they are read."""

    def program(strategy):
        end = prepare_ahead(strategy)
        try:
            return {
                "shuffled": shuffled(strategy),
                "separate": creator(strategy, [11, 5]),
            }
        finally:
            end()

    alone = shuffled(one_device())
    expected = {"shuffled": alone, "separate": cluster(creator, [11, 5])[0]}
    assert_workers(expected, cluster(program))
