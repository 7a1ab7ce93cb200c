"""Custom training loops: the same numbers as on one device."""

from __future__ import annotations

import functools
import textwrap

import keras
import numpy as np
import pytest
from custom_loops.helpers import assert_alike, descend, per_replica
from harness.forker import run_code
from harness.strategies import STRATEGIES
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.runtime.row_splits import split_sizes

CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(
    from_logits=True, reduction=None
)


def data(rows):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 6)).astype("float32")
    return x, random.integers(0, 3, rows).astype("int32")


def classifier():
    hidden = layers.Dense(8, activation="relu")
    norm = layers.BatchNormalization(momentum=0.8)
    return keras.Sequential([keras.Input((6,)), hidden, norm, layers.Dense(3)])


def batches(strategy, arrays, size):
    """Batches of the arrays, as `strategy` gives them to its replicas."""
    count = strategy.num_replicas_in_sync
    for start in range(0, len(arrays[0]), size):
        batch = [array[start : start + size] for array in arrays]
        if count == 1:
            yield tuple(ops.convert_to_tensor(array) for array in batch)
            continue
        ends = np.cumsum(split_sizes(len(batch[0]), count))[:-1]
        yield tuple(
            ks.PerReplica([ops.convert_to_tensor(p) for p in np.split(array, ends)])
            for array in batch
        )


def loop(strategy, rows, batch=16, build=True, jit_compile=None):
    """The portable loop: what `ks` offers, and nothing of a backend's own."""
    if keras.backend.backend() == "jax":
        # Replicas that exchange batch statistics have equal rows there.
        rows += -rows % 4
    x, y = data(rows)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = classifier()
        optimizer = keras.optimizers.Adam(0.01, clipnorm=0.5, weight_decay=0.01)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        scale = keras.metrics.Mean()
        if build:
            optimizer.build(model.trainable_variables)

    def replica_step(batch):
        x, y = batch

        def loss_fn():
            scores = model(x, training=True)
            accuracy.update_state(y, scores)
            return ks.compute_average_loss(CROSS_ENTROPY(y, scores)), scores

        variables = model.trainable_variables
        gradient = ks.value_and_grad(loss_fn, variables, has_aux=True)
        (loss, scores), gradients = gradient()
        optimizer.apply(gradients, variables)
        scale.update_state(ops.abs(scores))
        return loss

    def step(batch):
        losses = strategy.run(replica_step, args=(batch,))
        return strategy.reduce("SUM", losses, axis=None)

    step = ks.function(step, jit_compile=jit_compile)
    logs = []
    for _ in range(2):
        accuracy.reset_state()
        for part in batches(strategy, (x, y), batch):
            logs.append(float(step(part)))
        logs += [float(accuracy.result()), float(scale.result())]
    iterations = float(ops.convert_to_numpy(optimizer.iterations))
    return [np.array([*logs, iterations]), *model.get_weights()]


@functools.cache
def alone(rows, batch=16):
    return loop(ks.get_strategy(), rows, batch)


# Strategy, rows, rows of a batch, whether the optimizer is built before the loop, and
# what only this crossing reaches. Batches of 16 and a last one of 3 rows.
PORTABLE = {
    "one_device": (35, 16, True, "`run` calls the function itself"),
    "mirrored_2": (35, 16, True, "a last batch of 2 rows and 1"),
    "mirrored_4": (35, 16, False, "a replica without rows; slots made in a run"),
    "central": (35, 16, False, "one update; slots made in a run lie where it is"),
}


@pytest.mark.one_backend("torch")
@pytest.mark.parametrize(
    ("name", "rows", "batch", "build"),
    [(name, *values[:3]) for name, values in PORTABLE.items()],
)
def test_the_portable_loop_equals_one_device(name, rows, batch, build):
    found = loop(STRATEGIES[name].make(), rows, batch, build)
    assert_alike(found, alone(rows, batch))


@pytest.mark.one_backend
@pytest.mark.slow(seconds=9)
def test_the_portable_loop_with_and_without_a_compiler(mirrored):
    options = [False, True] if keras.backend.backend() == "torch" else [False]
    for jit_compile in options:
        found = loop(mirrored, 32, jit_compile=jit_compile)
        assert_alike(found, alone(32))


def test_gradients_that_are_accumulated_by_hand(mirrored):
    x, y = data(24)

    def train(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = classifier()
            optimizer = keras.optimizers.SGD(0.1)
            variables = model.trainable_variables
            optimizer.build(variables)
            options = {"synchronization": "on_read", "aggregation": "sum"}
            zeros = [np.zeros(v.shape, "float32") for v in variables]
            sums = [keras.Variable(z, trainable=False, **options) for z in zeros]

        def accumulate(x, y):
            def loss_fn():
                scores = model(x, training=True)
                return ks.compute_average_loss(CROSS_ENTROPY(y, scores))

            _, gradients = ks.value_and_grad(loss_fn, variables)()
            for total, gradient in zip(sums, gradients, strict=True):
                total.assign_add(gradient)

        def update():
            gradients = [ops.convert_to_tensor(total) / 2 for total in sums]
            optimizer.apply(gradients, variables)
            for total in sums:
                total.assign(ops.zeros(total.shape))

        # Otherwise JAX compiles each operation by itself on one device.
        compiled = (lambda step: step) if strategy is mirrored else ks.function
        add = compiled(lambda *batch: strategy.run(accumulate, args=batch))
        apply = compiled(lambda: strategy.run(update))
        for i, batch in enumerate(batches(strategy, (x, y), 6)):
            add(*batch)
            if i % 2:
                apply()
        return model.get_weights()

    assert_alike(train(mirrored), train(ks.get_strategy()))


def test_frozen_parts_stay_as_they_are_and_none_is_no_gradient(mirrored):
    with mirrored.scope():
        used, unused = keras.Variable(np.ones(2, "float32")), keras.Variable(3.0)
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([used, unused])

    def step(x):
        def loss_fn():
            return ops.sum(used * x)

        _, gradients = ks.value_and_grad(loss_fn, [used, unused])()
        assert gradients[1] is None
        optimizer.apply(gradients, [used, unused])

    mirrored.run(step, args=(per_replica([1, 1], [1, 1]),))
    np.testing.assert_allclose(ops.convert_to_numpy(used), [0, 0])
    assert float(unused.numpy()) == 3


def replicas(count):
    """A strategy of so many replicas, one for one device."""
    if count == 1:
        return ks.get_strategy()
    return ks.MirroredStrategy([f"cpu:{i}" for i in range(count)])


@pytest.mark.parametrize("stops", ["argument", "result"])
@pytest.mark.parametrize("count, compiled", [(2, False), (3, True)])
def test_the_largest_value_of_the_batch_is_a_constant_of_the_loss(
    count, compiled, stops
):
    """A softmax over the batch is computed from differences to its largest logit."""

    def largest(logits):
        context = ks.get_replica_context()
        if stops == "argument":
            return context.all_reduce("MAX", ops.stop_gradient(ops.max(logits)))
        return ops.stop_gradient(context.all_reduce("MAX", ops.max(logits)))

    def train(strategy):
        with strategy.scope():
            weights = keras.Variable(np.ones((6, 1), "float32"))
            optimizer = keras.optimizers.SGD(0.5)
            optimizer.build([weights])

        def step(x, y):
            def loss_fn():
                logits = ops.matmul(x, weights)[:, 0]
                chosen = ops.sum(ops.where(y == 1, logits, ops.zeros_like(logits)))
                shifted = logits - largest(logits)
                total = ops.sum(ops.exp(shifted))
                total = ks.get_replica_context().all_reduce("SUM", total)
                # Not a softmax: the difference has a gradient of its own.
                return ops.sum(shifted**2) - chosen / ops.stop_gradient(total)

            return descend(loss_fn, [weights], optimizer)

        def run(x, y):
            return strategy.reduce("SUM", strategy.run(step, args=(x, y)), axis=None)

        run = ks.function(run) if compiled else run
        losses = [float(run(*batch)) for batch in batches(strategy, data(36), 12)]
        return [np.array(losses), ops.convert_to_numpy(weights)]

    assert_alike(train(replicas(count)), train(replicas(1)))


def test_a_largest_value_without_a_stop_is_refused(mirrored):
    with mirrored.scope():
        variable = keras.Variable(2.0)

    def step(x):
        def loss_fn():
            return ks.get_replica_context().all_reduce("MAX", x * variable)

        return ks.value_and_grad(loss_fn, [variable])()[0]

    with pytest.raises(ks.errors.GatherError, match="MAX has no gradient"):
        mirrored.run(step, args=(per_replica(1, 2),))


@pytest.mark.parametrize("count, compiled", [(2, False), (3, True)])
def test_updates_in_merge_calls_equal_one_device(count, compiled):
    """An optimizer by hand, and a moving average that the loss function updates."""
    rows = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")

    def train(strategy):
        with strategy.scope():
            weights = keras.Variable(np.ones(4, "float32"))
            zeros = np.zeros(4, "float32")
            moment, average = (keras.Variable(zeros, trainable=False) for _ in range(2))

        def follow(strategy, sums):
            total = strategy.extended.reduce_to("SUM", sums, average)
            update = strategy.extended.update
            update(average, lambda v, d: v.assign(v * 0.9 + d), args=(total,))

        def apply(strategy, gradient):
            both = [(gradient, moment), (gradient, weights)]
            first, second = strategy.extended.batch_reduce_to("SUM", both)
            update = strategy.extended.update
            update(moment, lambda v, d: v.assign(v * 0.5 + d), args=(first,))
            return update(
                weights, lambda v, d: v.assign_sub(0.01 * (d + moment)), args=(second,)
            )

        def step(x):
            context = ks.get_replica_context()

            def loss_fn():
                found = x * weights
                context.merge_call(follow, args=(ops.sum(found, 0),))
                return ops.sum(found**2)

            _, (gradient,) = ks.value_and_grad(loss_fn, [weights])()
            after = context.merge_call(apply, args=(gradient,))
            # What is read on a replica afterwards is new.
            return ops.sum(after - weights)

        def run(x):
            return strategy.run(step, args=(x,))

        run = ks.function(run) if compiled else run
        for scale in (1.0, 2.0, 3.0):
            found = run(
                strategy.experimental_distribute_values_from_function(
                    lambda c: ops.convert_to_tensor(
                        rows[c.replica_id_in_sync_group :: c.num_replicas_in_sync]
                        * np.float32(scale)  # noqa: B023
                    )
                )
            )
            local = strategy.experimental_local_results(found)
            assert not np.any([ops.convert_to_numpy(own) for own in local])
        return [ops.convert_to_numpy(v) for v in (weights, moment, average)]

    assert_alike(train(replicas(count)), train(replicas(1)), 1e-5)


def test_an_unbuilt_model_has_no_gradients():
    """Its first step would otherwise update nothing, in silence."""
    model = keras.Sequential([layers.Dense(1)])
    with pytest.raises(ValueError, match=r"no variables.*keras\.Input"):
        ks.value_and_grad(lambda: 0.0, model.trainable_variables)


@pytest.mark.one_backend
def test_a_step_before_every_strategy_is_one_of_plain_keras(tmp_path):
    code = """
        import keras
        import numpy as np
        import keras_strategies as ks

        keras.utils.set_random_seed(1)
        norm = keras.layers.BatchNormalization()
        model = keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(2)])
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        x = np.arange(12, dtype="float32").reshape(4, 3) / 12
        x, y = map(keras.ops.convert_to_tensor, (x, x[:, :2]))
        loss_fn = keras.losses.MeanSquaredError()

        def step(x, y):
            loss, gradients = ks.value_and_grad(
                lambda: loss_fn(y, model(x, training=True)), model.trainable_variables
            )()
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        before, after = float(step(x, y)), float(ks.function(step)(x, y))
        assert after < before, (before, after)
    """
    run_code(tmp_path, textwrap.dedent(code), imports_strategies=True)
