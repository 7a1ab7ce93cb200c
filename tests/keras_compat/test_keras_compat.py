"""Patched attributes of Keras exist, and are restored."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest

from keras_strategies.keras_compat.thread_state import (
    kept_scope_state,
    thread_state,
    with_thread_state,
)

pytestmark = pytest.mark.one_backend


def test_threads_at_the_same_time_have_scopes_of_their_own() -> None:
    """Keras changes the stacks of name scopes and of `RematScope` in place."""
    from keras.src.backend.common.name_scope import current_path
    from keras.src.backend.common.remat import get_current_remat_mode

    barrier, found = threading.Barrier(2, timeout=60), {}

    def in_scopes(name: str) -> None:
        with with_thread_state(state):
            for turn in ("one", "two"):
                with contextlib.ExitStack() as stack:
                    if turn == name:
                        stack.enter_context(keras.name_scope(f"of_{name}"))
                        stack.enter_context(keras.RematScope("full"))
                    barrier.wait()
                    found[name, turn] = (current_path(), get_current_remat_mode())
                    barrier.wait()

    with keras.name_scope("caller"), keras.RematScope(None):
        state = thread_state()
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(in_scopes, ("one", "two"))) == [None, None]
        assert current_path() == "caller"
    paths = {key: path for key, (path, _) in found.items()}
    own = {(name, name): f"caller/of_{name}" for name in ("one", "two")}
    assert paths == {("one", "two"): "caller", ("two", "one"): "caller", **own}
    # Keras 3.16 has no mode in a scope of None.
    modes = {key: mode and mode.mode for key, (_, mode) in found.items()}
    assert modes == {key: "full" if len(set(key)) == 1 else None for key in paths}


def test_the_device_of_a_scope_outlasts_clear_session(mirrored) -> None:
    if keras.backend.backend() != "torch":
        pytest.skip("only Keras on Torch has its device in the state of a thread")
    with mirrored.scope():
        pass  # It installs what follows the state of threads.
    # `meta`, as another device than the default one, which is the CPU here.
    with keras.device("meta"), kept_scope_state():
        keras.utils.clear_session()
        variable = keras.Variable([1.0])
    assert variable.value.device.type == "meta"
    assert keras.Variable([1.0]).value.device.type == "cpu"
