"""`ks.callbacks.Verify` compares replicas during `fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from verification.planted_in_fit import compiled, data, dense

import keras_strategies as ks
from keras_strategies.keras_compat.strategy_attribute import strategy_of
from keras_strategies.verification import verify_callback

pytestmark = pytest.mark.one_backend

Verify = ks.callbacks.Verify


def made(build: Any) -> Any:
    strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        return build()


def test_a_sound_model_passes_all_checks() -> None:
    verify = Verify(every=2, time_share=None)
    model = made(lambda: dense(keras.layers.BatchNormalization()))
    model.fit(**data(), epochs=2, verbose=0, callbacks=[verify])
    assert verify.checks == 3


class Wrong(keras.layers.Layer):
    """As a device that computes wrong: the second replica, and only in `run`."""

    def call(self, x: Any) -> Any:
        replica = ks.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return x
        number = ops.cast(replica.replica_id_in_sync_group, x.dtype)
        return x * (1 + 0.01 * number)


@pytest.mark.filterwarnings("ignore:Layer .* cannot be split")
def test_a_replica_that_computes_wrong_is_named() -> None:
    model = made(lambda: dense(Wrong(name="wrong")))
    verify = Verify(every=1, time_share=None)
    with pytest.raises(RuntimeError, match=r"Replica 1 computes other outputs .*wrong"):
        model.fit(**data(), verbose=0, callbacks=[verify])
    assert verify.checks == 2


def corrupted(value: Any) -> Any:
    """A copy on one device with one bit changed; for JAX, the new array."""
    good = np.asarray(ops.convert_to_numpy(value))
    bad = good.copy()
    bad[0, 0] = np.nextafter(bad[0, 0], np.float32(2))
    if keras.backend.backend() == "jax":
        import jax

        devices = [shard.device for shard in value.addressable_shards]
        arrays = list(map(jax.device_put, (good, bad), devices))
        make = jax.make_array_from_single_device_arrays
        return make(good.shape, value.sharding, arrays)
    if keras.backend.backend() == "torch":
        value.data.copy_(ops.convert_to_tensor(bad))
    else:
        value.assign(bad)
    return None


def test_a_corrupt_copy_is_named() -> None:
    model = made(dense)
    model.fit(**data(), verbose=0)
    strategy = strategy_of(model)
    kernel = model.layers[0].kernel
    verify = Verify(share=1.0)
    verify.set_model(model)
    verify.check()
    copies = strategy.drivers.fit.copies(kernel)
    is_jax = keras.backend.backend() == "jax"
    if len({id(copy.value) for copy in copies}) == 1:
        pytest.skip("virtual CPU devices of this backend share one copy")
    found = corrupted(kernel.value if is_jax else copies[-1].value)
    if is_jax:
        kernel._value = found
    with pytest.raises(RuntimeError, match=rf"Copies of variable '{kernel.path}'"):
        verify.check()


def test_a_check_is_below_half_a_percent_of_its_steps() -> None:
    """Counted: rows of layer calls and elements of variables that are read."""
    batch, every = 64, 100
    layers = [keras.layers.Dense(3) for _ in range(4)]
    model = made(lambda: compiled(keras.Sequential([keras.Input((6,)), *layers])))
    model.build((None, 6))
    model.optimizer.build(model.trainable_variables)
    verify = Verify(every=every)
    verify.set_model(model)
    # A check calls one layer on both replicas.
    rows_of_check = verify.rows * 2
    layers, passes = len(model.layers), 3  # Forward, and twice as much backward.
    assert rows_of_check < 0.005 * every * batch * layers * passes
    sizes = [int(np.prod(v.shape)) for v in verify._some_variables(model)]
    total = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    # A step reads them twice and writes them once, on both replicas.
    assert 2 * sum(sizes) < 0.005 * every * 2 * 3 * total
    seen = {v.path for _ in range(16) for v in verify._some_variables(model)}
    assert {v.path for v in model.trainable_variables} <= seen


@pytest.mark.nightly
@pytest.mark.one_backend("jax")
def test_checks_warn_of_nothing_that_is_the_users(recwarn, caplog) -> None:
    model = made(lambda: dense(keras.layers.Dense(4)))
    verify = Verify(every=1, time_share=None)
    model.fit(**data(), epochs=8, verbose=0, callbacks=[verify])
    assert verify.checks == 24
    assert not [each for each in recwarn if "`run`" in str(each.message)]
    assert "`run`" not in caplog.text


def test_checks_that_take_long_wait_for_more_steps(monkeypatch) -> None:
    """A clock by which a step takes a second, and a check 3."""
    now = 0.0
    monkeypatch.setattr(verify_callback.time, "monotonic", lambda: now)
    verify = Verify(every=2, time_share=0.5)
    checked: list[int] = []

    def check() -> None:
        nonlocal now
        now += 3.0
        checked.append(verify._steps)

    monkeypatch.setattr(verify, "check", check)
    verify.set_model(made(dense))
    verify.on_train_begin()
    for _ in range(14):
        now += 1.0
        verify.on_train_batch_end(0)
    assert checked == [2, 8, 14]


def test_bad_input_is_an_error_at_once() -> None:
    given = ({"every": 0}, {"rows": 0}, {"share": 0.0}, {"share": 2.0})
    for options in (*given, {"time_share": 0.0}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` of `Verify`"):
            Verify(**options)
    with pytest.raises(ValueError, match="no strategy"):
        dense().fit(**data(), verbose=0, callbacks=[Verify()])
