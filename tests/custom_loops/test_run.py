"""`run`, `reduce`, `gather` and replica contexts: one test per promise."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest
from custom_loops.helpers import numbers, per_replica
from keras import layers, ops

import keras_strategies as ks

NOT_JAX = pytest.mark.skipif(
    keras.backend.backend() == "jax",
    reason="replicas are one program there: backends/jax/test_jax_uneven_run.py",
)
Point = collections.namedtuple("Point", "x y")


def replica_id():
    return ks.get_replica_context().replica_id_in_sync_group


def assert_usable(strategy):
    """The strategy can be used after an error."""
    assert numbers(strategy.run(lambda x: x + 1, args=(per_replica(1, 2),))) == [2, 3]


# Arguments and results.


@pytest.mark.parametrize("args", [{"x": 1}, 5, "abc"])
def test_args_that_are_no_list_or_tuple_are_refused(mirrored, args):
    with pytest.raises(ValueError, match="list or tuple"):
        mirrored.run(lambda x: x, args=args)


def test_nested_arguments_and_keyword_arguments_are_taken_apart(mirrored):
    x, y = per_replica(1.0, 2.0), per_replica(10.0, 20.0)

    def fn(batch, *, weight, offset):
        return batch["x"][0] * weight[0] + offset

    found = mirrored.run(fn, args=({"x": [x]},), kwargs={"weight": (y,), "offset": 3.0})
    assert isinstance(found, ks.PerReplica)
    assert numbers(found) == [13, 43]


def test_the_identical_object_on_all_replicas_comes_back_bare(mirrored):
    thing = object()
    assert mirrored.run(lambda: thing) is thing
    assert mirrored.run(lambda: 5) == 5
    assert mirrored.run(lambda: None) is None


def test_an_argument_whose_values_are_not_used_may_have_another_length() -> None:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    rows = np.zeros((13, 2), "float32")
    batches = strategy.experimental_distribute_dataset(rows, batch_size=8)
    counts = [strategy.run(lambda part: len(part), (batch,)) for batch in batches]
    # Of equal numbers `run` returns one.
    assert counts[0] == 4
    assert strategy.experimental_local_results(counts[1]) == (3, 2)


def test_containers_keep_their_type(mirrored):
    x = per_replica(1.0, 2.0)

    def fn(x):
        ordered = collections.OrderedDict(a=x + 1)
        return {"point": Point(x + 1, 3), "list": [x + 2], "ordered": ordered}

    found = mirrored.run(fn, args=(x,))
    assert type(found["point"]) is Point and found["point"].y == 3
    assert type(found["list"]) is list
    assert type(found["ordered"]) is collections.OrderedDict
    assert numbers(found["point"].x) == [2, 3]
    assert numbers(found["list"][0]) == [3, 4]


def test_run_and_reduce_inside_a_replica_are_refused(mirrored):
    for fn in (
        lambda: mirrored.run(lambda: 1),
        lambda: mirrored.reduce("SUM", ops.ones(()), axis=None),
        lambda: mirrored.gather(ops.ones((1,)), axis=0),
    ):
        with pytest.raises(RuntimeError, match="inside a replica function"):
            mirrored.run(fn)


def test_an_exception_in_the_function_keeps_its_type(mirrored):
    def fn():
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom"):
        mirrored.run(fn)
    assert_usable(mirrored)


@NOT_JAX
def test_an_exception_in_one_replica_reaches_the_caller(mirrored):
    def fn():
        if replica_id() == 1:
            raise KeyError("boom")
        ks.get_replica_context().all_reduce("SUM", ops.ones(()))

    with pytest.raises(KeyError, match="boom"):
        mirrored.run(fn)
    assert_usable(mirrored)


def test_replicas_that_disagree_on_merge_calls_are_an_error(mirrored):
    def fn():
        context = ks.get_replica_context()
        for _ in range(context.replica_id_in_sync_group):
            context.merge_call(lambda strategy: None)

    with pytest.raises(RuntimeError):
        mirrored.run(fn)
    assert_usable(mirrored)


@pytest.mark.parametrize("number", [3, 0.5])
def test_a_python_number_is_summed_over_replicas(mirrored, number):
    found = mirrored.run(lambda: ks.get_replica_context().all_reduce("SUM", number))
    for total in mirrored.experimental_local_results(found):
        assert float(total) == 2 * number
        assert ("int" in str(total.dtype)) == isinstance(number, int)


@NOT_JAX
def test_python_may_branch_on_the_replica(mirrored):
    found = mirrored.run(lambda: ops.ones((replica_id() + 1,)))
    assert numbers(found) == [[1], [1, 1]]


# Replica contexts.


def test_a_replica_knows_its_number_and_its_strategy(mirrored):
    def fn():
        context = ks.get_replica_context()
        assert context.strategy is mirrored
        assert context.num_replicas_in_sync == 2
        assert not ks.in_cross_replica_context()
        return ops.convert_to_tensor(context.replica_id_in_sync_group) + 0

    assert numbers(mirrored.run(fn)) == [0, 1]
    with mirrored.scope():
        assert ks.get_replica_context() is None


@NOT_JAX
def test_devices_are_those_of_the_replica(mirrored):
    seen = []
    mirrored.run(lambda: seen.append(ks.get_replica_context().devices))
    assert seen[-2:] == [("cpu:0",), ("cpu:1",)]


def test_merge_call_takes_keyword_arguments_and_returns_structures(mirrored):
    def merge(strategy, *, value, scale):
        assert ks.in_cross_replica_context() and strategy is mirrored
        total = strategy.reduce("SUM", value, axis=None)
        return {"total": total * scale, "name": "sum"}

    def fn(x):
        context = ks.get_replica_context()
        found = context.merge_call(merge, kwargs={"value": x, "scale": 2.0})
        return found["total"] + 0, found["name"]

    total, name = mirrored.run(fn, args=(per_replica(1.0, 2.0),))
    assert numbers(total) == [6, 6]
    assert name == "sum"


def test_components_of_a_merged_result_go_back_to_their_replicas(mirrored):
    def merge(strategy, value):
        first, second = strategy.experimental_local_results(value)
        return ks.PerReplica([second, first])

    def fn(x):
        return ks.get_replica_context().merge_call(merge, args=(x,)) + 0

    assert numbers(mirrored.run(fn, args=(per_replica(1.0, 2.0),))) == [2, 1]


COLLECTIVES = {
    "sum": ((1, 4), 5, lambda context, x: context.all_reduce("SUM", x)),
    "mean": ((1, 4), 2.5, lambda context, x: context.all_reduce("mean", x)),
    "min": ((1, 4), 1, lambda context, x: context.all_reduce("MIN", x)),
    "max": ((1, 4), 4, lambda context, x: context.all_reduce(ks.ReduceOp.MAX, x)),
    "rows": (([[1]], [[2]]), [[1], [2]], lambda context, x: context.all_gather(x, 0)),
    "columns": (([[1]], [[2]]), [[1, 2]], lambda context, x: context.all_gather(x, 1)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_of_a_structure(mirrored, name):
    parts, expected, collective = COLLECTIVES[name]

    def fn(x):
        found = collective(ks.get_replica_context(), {"a": x, "b": (x * 10, [x])})
        return found["a"] + 0, found["b"][0] + 0, found["b"][1][0] + 0

    once, ten_times, nested = mirrored.run(fn, args=(per_replica(*parts),))
    assert numbers(once) == numbers(nested) == [expected] * 2
    assert numbers(ten_times) == [(10 * np.array(expected)).tolist()] * 2


@NOT_JAX
def test_all_gather_of_uneven_lengths(mirrored):
    def fn(x):
        return ks.get_replica_context().all_gather(x, axis=0) + 0

    found = mirrored.run(fn, args=(per_replica([1, 2, 3], [4]),))
    assert numbers(found) == [[1, 2, 3, 4]] * 2


def summed(weight, x):
    context = ks.get_replica_context()
    factor = ops.cast(context.replica_id_in_sync_group, "float32") + 1
    return factor * context.all_reduce("SUM", weight * ops.sum(x)) ** 2


def gathered(weight, x):
    return ops.sum(ks.get_replica_context().all_gather(weight * x, axis=0) ** 2)


# With a weight of 2 the total of the sums is y = 2 (1 + 3) = 8. The gradients of 1 y^2
# and 2 y^2 by y are 16 and 32, and their sum goes to both replicas. Each of two losses
# of gathered parts is 4 * sum(x^2); its gradient is 2 * 2 * x^2 per element.
@pytest.mark.parametrize(
    "loss_of, parts, losses, gradients",
    [
        (summed, ([1.0], [3.0]), [64, 128], [48, 144]),
        pytest.param(summed, ([1.0, 0.0], [3.0]), [64, 128], [48, 144], marks=NOT_JAX),
        (gathered, ([1.0], [3.0]), [40, 40], [8, 72]),
        pytest.param(gathered, ([1.0, 1.0], [3.0]), [44, 44], [16, 72], marks=NOT_JAX),
    ],
    ids=["all_reduce", "all_reduce-uneven", "all_gather", "all_gather-uneven"],
)
def test_gradients_go_through(mirrored, loss_of, parts, losses, gradients):
    with mirrored.scope():
        weight = keras.Variable(np.float32(2))

    def fn(x):
        return ks.value_and_grad(lambda: loss_of(weight, x), [weight])()

    found, (gradient,) = mirrored.run(fn, args=(per_replica(*parts),))
    assert numbers(found) == losses
    assert numbers(gradient) == gradients


# Reduce and gather.


def test_reduce_of_a_structure_and_of_what_is_the_same_everywhere(mirrored):
    found = mirrored.reduce("MEAN", {"a": per_replica(1, 2), "b": 3.0}, axis=None)
    assert float(found["a"]) == 1.5
    assert float(found["b"]) == 3


def test_run_reduce_and_gather_inside_a_function(mirrored):
    @ks.function
    def step(x):
        y = mirrored.run(lambda x: x * 2, args=(x,))
        total = mirrored.reduce("SUM", y, axis=0)
        return total, mirrored.gather(y, axis=0), y

    for parts in (([1, 2], [3, 4]), ([1, 2, 3], [4]), ([5, 6], [7, 8])):
        total, gathered, y = step(per_replica(*parts))
        every = [2 * value for part in parts for value in part]
        assert float(total) == sum(every)
        assert np.asarray(ops.convert_to_numpy(gathered)).tolist() == every
        assert numbers(y) == [[2 * value for value in part] for part in parts]


# Variables.


def _variable(strategy, synchronization, aggregation, value=10.0, dtype="float32"):
    options = {"synchronization": synchronization, "aggregation": aggregation}
    with strategy.scope():
        return keras.Variable(
            np.array(value, dtype), dtype=dtype, trainable=False, **options
        )


def _number(strategy):
    """A value of each replica, which Python on the host has made."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: ops.convert_to_tensor(
            np.float32(context.replica_id_in_sync_group + 1)
        )
    )


@pytest.mark.parametrize(
    "aggregation, together", [("sum", 3), ("mean", 1.5), ("only_first_replica", 1)]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_on_read_variables_are_brought_together_when_read(
    mirrored, aggregation, together, compiled
):
    v = _variable(mirrored, "on_read", aggregation)

    def assign(number):
        v.assign(number)

    def run(fn, *args):
        def step(*args):
            return mirrored.run(fn, args=args)

        return (ks.function(step) if compiled else step)(*args)

    run(assign, _number(mirrored))
    assert numbers(run(lambda: v.value + 0)) == [1, 2]
    assert float(v.numpy()) == together


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
@pytest.mark.parametrize(
    "aggregation, together", [("sum", True), ("only_first_replica", False)]
)
def test_aggregated_booleans_stay_booleans(
    mirrored, synchronization, aggregation, together
):
    v = _variable(mirrored, synchronization, aggregation, [True, False], "bool")
    # The second replica alone assigns True.
    mirrored.run(lambda i: v.assign([i > 1.0, False]), args=(_number(mirrored),))
    assert keras.backend.standardize_dtype(v.value.dtype) == "bool"
    np.testing.assert_array_equal(v.numpy(), [together, False])


def test_variables_without_aggregation_are_not_brought_together(mirrored):
    v = _variable(mirrored, "on_read", "none")
    mirrored.run(lambda number: v.assign(number), args=(_number(mirrored),))
    assert numbers(mirrored.run(lambda: v.value + 0)) == [1, 2]
    with pytest.raises(ValueError, match="aggregation"):
        v.numpy()
    with pytest.raises(ValueError, match="aggregation"), mirrored.scope():
        ops.add(v, 1.0)
    w = _variable(mirrored, "on_write", "none")
    with pytest.raises(ValueError, match="aggregation"):
        mirrored.run(lambda: w.assign(1.0))


def test_assigning_an_on_read_sum_outside_gives_replicas_their_parts(mirrored):
    v = _variable(mirrored, "on_read", "sum")
    mirrored.run(lambda number: v.assign(number), args=(_number(mirrored),))
    v.assign(8.0)
    parts = numbers(mirrored.run(lambda: v.value + 0))
    assert sum(parts) == 8
    mirrored.run(lambda number: v.assign_add(number), args=(_number(mirrored),))
    assert float(v.numpy()) == 11


@pytest.mark.parametrize("compiled", [False, True])
def test_metrics_count_on_all_replicas(mirrored, compiled):
    with mirrored.scope():
        metric = keras.metrics.Mean()

    def step(x):
        mirrored.run(lambda x: metric.update_state(x), args=(x,))
        return metric.result()

    step = ks.function(step) if compiled else step
    assert float(step(per_replica([1, 2, 3], [4]))) == 2.5
    assert float(step(per_replica([1, 2], [3, 4]))) == 2.5
    metric.reset_state()
    assert float(step(per_replica([5, 6], [7, 8]))) == 6.5
    assert float(metric.result()) == 6.5


def test_random_layers_draw_a_mask_of_each_replicas_own(mirrored):
    x = per_replica(np.ones((1, 64)), np.ones((1, 64)))

    def draw():
        keras.utils.set_random_seed(3)
        with mirrored.scope():
            dropout = layers.Dropout(0.5, seed=1)
        first = mirrored.run(lambda x: dropout(x, training=True), args=(x,))
        second = mirrored.run(lambda x: dropout(x, training=True), args=(x,))
        return [*numbers(first), *numbers(second)]

    masks = draw()
    assert len({str(mask) for mask in masks}) == 4
    assert draw() == masks


# Losses.


def test_compute_average_loss_divides_by_the_global_batch():
    losses = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert float(ks.compute_average_loss(losses, global_batch_size=10)) == 1.5
    weighted = ks.compute_average_loss(
        losses, sample_weight=np.full(5, 2, "float32"), global_batch_size=10
    )
    assert float(weighted) == 3


@pytest.mark.parametrize("parts", [([1, 2], [3, 4]), ([1, 2, 3], [4])])
def test_compute_average_loss_counts_the_rows_of_all_replicas(mirrored, parts):
    found = mirrored.run(ks.compute_average_loss, args=(per_replica(*parts),))
    assert float(mirrored.reduce("SUM", found, axis=None)) == 2.5


def test_scale_regularization_loss_adds_up_to_the_loss(mirrored):
    found = mirrored.run(lambda: ks.scale_regularization_loss(ops.ones((3,))))
    assert float(mirrored.reduce("SUM", found, axis=None)) == 3
