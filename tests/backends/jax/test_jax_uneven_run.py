"""JAX: `run` with replicas of different numbers of rows, each on its device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

if keras.backend.backend() != "jax":
    pytest.skip("tests of the JAX backend", allow_module_level=True)

import jax
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.engines.jax.fit.hlo_collectives import sent_bytes
from keras_strategies.engines.jax.function.program_sharding import ProgramSharding
from keras_strategies.engines.jax.run.unrolled_replicas import UnrolledReplicas

ks.set_virtual_cpu_devices(4)
X = np.random.default_rng(3).normal(size=(13, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
CPUS = [f"cpu:{i}" for i in range(4)]


@pytest.fixture
def unrolled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The functions that every device computes for all replicas."""
    found: list[Any] = []
    call = UnrolledReplicas.__call__

    def recording(self: Any, arguments: Any) -> Any:
        found.append(self._fn)
        return call(self, arguments)

    monkeypatch.setattr(UnrolledReplicas, "__call__", recording)
    yield found


def trained(strategy: Any, compiled: bool, batch: int = 5) -> dict[str, Any]:
    """A loop of two epochs with batches of which the last is smaller."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(6, activation="tanh"),
                layers.Dropout(0.3),
                layers.Dense(1),
            ]
        )
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
        metric = keras.metrics.MeanAbsoluteError()

    def replica_step(batch: Any) -> Any:
        x, y = batch

        def loss_fn() -> Any:
            outputs = model(x, training=True)
            losses = ops.square(outputs - y)[:, 0]
            return ks.compute_average_loss(losses), outputs

        variables = model.trainable_variables
        (loss, outputs), gradients = ks.value_and_grad(
            loss_fn, variables, has_aux=True
        )()
        optimizer.apply(gradients, variables)
        metric.update_state(y, outputs)
        return loss, outputs, {"rows": x.shape[0]}

    def step(batch: Any) -> Any:
        return strategy.run(replica_step, args=(batch,))

    if compiled:
        step = ks.function(step)
    losses, outputs, rows = [], [], []
    dataset = strategy.experimental_distribute_dataset(
        [(X[i : i + batch], Y[i : i + batch]) for i in range(0, len(X), batch)]
    )
    for _ in range(2):
        for each in dataset:
            loss, found, counts = step(each)
            losses.append(float(strategy.reduce("SUM", loss)))
            outputs.append(np.asarray(strategy.gather(found, axis=0)))
            local = strategy.experimental_local_results(counts["rows"])
            rows.append(sum(local) if len(set(local)) > 1 else None)
    return {
        "losses": losses,
        "outputs": np.concatenate(outputs),
        "weights": model.get_weights(),
        "metric": float(metric.result()),
        "iterations": int(optimizer.iterations),
        "rows": rows,
    }


@pytest.mark.parametrize(("count", "compiled"), [(2, True), (4, False)])
def test_a_loop_on_uneven_rows_is_sharded(
    unrolled: list[Any], count: int, compiled: bool
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The replicas of")
        found = trained(ks.MirroredStrategy(CPUS[:count]), compiled)
    assert unrolled == []
    expected = trained(ks.OneDeviceStrategy("cpu:0"), compiled)
    assert found["rows"][0] == 5  # Of replicas with 3 and 2 rows, as Python numbers.
    for name in ("losses", "outputs", "metric", "iterations"):
        np.testing.assert_allclose(
            found[name], expected[name], 1e-4, 1e-5, err_msg=name
        )
    for own, other in zip(found["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["all_reduce", "merge_call", "read", "assign", "two"])
def test_code_that_needs_other_replicas_is_unrolled_with_a_warning(
    unrolled: list[Any], kind: str
) -> None:
    def looped(strategy: Any) -> Any:
        with strategy.scope():
            weight = keras.Variable(np.ones(4, "float32"))
            optimizer = keras.optimizers.SGD(0.125)
            optimizer.build([weight])

        def replica_step(x: Any) -> Any:
            def loss_fn() -> Any:
                return ops.sum(ops.square(x @ ops.reshape(weight, (4, 1))))

            replica = ks.get_replica_context()
            loss, gradients = ks.value_and_grad(loss_fn, [weight])()
            if kind == "all_reduce":
                loss = loss + 0 * replica.all_reduce("SUM", loss)
            if kind == "merge_call":
                replica.merge_call(lambda strategy: None)
            optimizer.apply([g / 100 for g in gradients], [weight])
            if kind == "two":
                _, gradients = ks.value_and_grad(loss_fn, [weight])()
                optimizer.apply([g / 100 for g in gradients], [weight])
            if kind == "assign":
                weight.assign(weight * 2)
            if kind == "read":
                loss = loss + 0 * ops.sum(weight)
            return loss

        dataset = strategy.experimental_distribute_dataset([X[:5]])
        losses = [strategy.run(replica_step, args=(b,)) for b in dataset]
        return float(strategy.reduce("SUM", losses[0])), np.asarray(weight)

    expected = looped(ks.OneDeviceStrategy("cpu:0"))
    with pytest.warns(UserWarning, match="The replicas of .*replica_step"):
        found = looped(ks.MirroredStrategy(CPUS[:2]))
    assert unrolled
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5)


@pytest.mark.parametrize("compiled", [True, False])
def test_rows_are_on_the_device_of_their_replica_only(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    everywhere: list[Any] = []
    place = ProgramSharding.place_inputs

    def placed(self: Any, arrays: Any) -> Any:
        everywhere.extend(arrays)
        return place(self, arrays)

    texts: list[str] = []
    compile_ = jax.stages.Lowered.compile

    def recorded(self: Any, *args: Any) -> Any:
        program = compile_(self, *args)
        texts.append(program.as_text())
        return program

    monkeypatch.setattr(ProgramSharding, "place_inputs", placed)
    monkeypatch.setattr(jax.stages.Lowered, "compile", recorded)
    strategy = ks.MirroredStrategy(CPUS)

    def step(batch: Any) -> Any:
        return strategy.run(lambda x, y: (2 * x[:, :1] + y, x.shape[0]), args=batch)

    if compiled:
        step = ks.function(step)
    dataset = strategy.experimental_distribute_dataset([(X[:10], Y[:10])])
    [(outputs, rows)] = [step(batch) for batch in dataset]
    assert everywhere == []
    assert strategy.experimental_local_results(rows) == (3, 3, 2, 2)
    parts = strategy.experimental_local_results(outputs)
    assert [part.shape for part in parts] == [(3, 1), (3, 1), (2, 1), (2, 1)]
    assert [str(*part.devices()) for part in parts] == [
        str(device) for device in jax.devices("cpu")[:4]
    ]
    np.testing.assert_allclose(np.concatenate(parts), 2 * X[:10, :1] + Y[:10], 1e-6)
    if not compiled:
        assert texts
    assert all(sent_bytes(text) == {} for text in texts)
