"""Contract section 3: what is current where."""

from __future__ import annotations

import threading

import pytest

import keras_strategies as ks


def test_outside_every_scope_the_default_replica_is_current() -> None:
    assert not ks.has_strategy()
    assert isinstance(ks.get_strategy(), ks.DefaultStrategy)
    assert ks.get_strategy() is ks.get_strategy()
    assert not ks.in_cross_replica_context()
    replica = ks.get_replica_context()
    assert (replica.replica_id_in_sync_group, replica.num_replicas_in_sync) == (0, 1)


def test_a_scope_is_cross_replica_and_ends(strategy) -> None:
    with strategy.scope() as current:
        assert current is strategy
        assert ks.has_strategy()
        assert ks.get_strategy() is strategy
        assert ks.get_replica_context() is None
        assert ks.in_cross_replica_context()
    assert not ks.has_strategy()


def test_a_scope_nests_in_itself(mirrored) -> None:
    with mirrored.scope(), mirrored.scope():
        with mirrored.scope():
            assert ks.get_strategy() is mirrored
        assert ks.get_strategy() is mirrored
    assert not ks.has_strategy()


def test_an_exception_ends_a_scope(mirrored) -> None:
    with pytest.raises(KeyError), mirrored.scope():
        raise KeyError("anything")
    assert not ks.has_strategy()


@pytest.mark.parametrize("other", ["one", "default"])
def test_another_strategy_inside_a_scope_is_an_error(mirrored, other) -> None:
    inner = ks.get_strategy() if other == "default" else ks.OneDeviceStrategy("cpu:0")
    with mirrored.scope():
        with pytest.raises(RuntimeError, match="Mixing different"):
            inner.scope().__enter__()
        assert ks.get_strategy() is mirrored


def test_run_of_another_strategy_inside_a_scope_is_an_error(mirrored) -> None:
    other = ks.OneDeviceStrategy("cpu:0")
    with mirrored.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        other.run(lambda: None)


def test_the_scope_belongs_to_its_thread(mirrored) -> None:
    seen = []
    with mirrored.scope():
        thread = threading.Thread(target=lambda: seen.append(ks.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_set_strategy_acts_as_a_scope_until_none(mirrored) -> None:
    ks.experimental_set_strategy(mirrored)
    try:
        assert ks.get_strategy() is mirrored
        assert ks.in_cross_replica_context()
    finally:
        ks.experimental_set_strategy(None)
    assert not ks.has_strategy()


def test_set_strategy_again_replaces_it(mirrored) -> None:
    other = ks.OneDeviceStrategy("cpu:0")
    try:
        ks.experimental_set_strategy(mirrored)
        ks.experimental_set_strategy(other)
        assert ks.get_strategy() is other
    finally:
        ks.experimental_set_strategy(None)


def test_set_strategy_inside_a_scope_is_an_error(mirrored) -> None:
    with mirrored.scope(), pytest.raises(RuntimeError, match="inside the scope"):
        ks.experimental_set_strategy(mirrored)
    assert not ks.has_strategy()
