"""`jit_compile=True` on Torch with several workers: all call programs, or none."""

from __future__ import annotations

import time
import warnings
from typing import Any

import keras
import pytest

if keras.backend.backend() != "torch":
    pytest.skip("other backends compile whole steps", allow_module_level=True)

from compiled_calls.models import (
    COMPILED,
    assert_equal,
    counted_programs,
    graphs_without_compiler,
    trained,
)

import keras_strategies as ks
from keras_strategies.engines.torch.data_parallel import compiled_calls


def _expected(name: str) -> dict[str, Any]:
    return trained(ks.OneDeviceStrategy("cpu:0"), name, is_compiled=False)


@pytest.mark.parametrize(
    ("name", "cluster"),
    [
        ("residual", "two"),
        pytest.param("gpt", "two", marks=pytest.mark.nightly),
        pytest.param("noisy", "two_by_two", marks=pytest.mark.nightly),
    ],
    indirect=["cluster"],
    scope="session",
)
def test_programs_of_workers_train_as_one_device(cluster, name) -> None:
    def program(strategy: Any) -> Any:
        with graphs_without_compiler(), counted_programs() as called:
            found = trained(strategy, name, is_compiled=True)
        return found, len(called)

    expected = _expected(name)
    for found, called in cluster(program):
        assert called == COMPILED * cluster.replicas // 2
        assert_equal(found, expected)


def test_a_worker_without_a_compiler_is_awaited_and_all_call_eagerly(cluster) -> None:
    """The slow one is named; the others wait for as long as it compiles."""

    def program(strategy: Any) -> Any:
        def slow(*arguments: Any) -> str:
            if strategy.cluster_resolver.task_id:
                time.sleep(1.0)
                return "InvalidCxxCompiler: no compiler"
            return compile_(*arguments)

        compile_, compiled_calls._compile = compiled_calls._compile, slow
        interval, compiled_calls._INTERVAL = compiled_calls._INTERVAL, 0.1
        try:
            with (
                graphs_without_compiler(),
                counted_programs() as called,
                warnings.catch_warnings(record=True) as caught,
            ):
                warnings.simplefilter("always")
                found = trained(strategy, "residual", is_compiled=True)
        finally:
            compiled_calls._compile = compile_
            compiled_calls._INTERVAL = interval
        texts = [str(each.message) for each in caught]
        return found, len(called), [text for text in texts if "jit_compile" in text]

    expected = _expected("residual")
    for found, called, texts in cluster(program):
        assert called == 0
        assert texts == [
            "Layer 'residual' (Functional) is called eagerly, though "
            "`jit_compile=True`: InvalidCxxCompiler: no compiler."
        ]
        assert_equal(found, expected)


def test_variables_in_shards_are_named_and_train(cluster):
    def program(strategy: Any) -> Any:
        own = ks.ModelParallelStrategy("fsdp", ["cpu:0"], min_shard_bytes=0)
        with (
            graphs_without_compiler(),
            counted_programs() as called,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            found = trained(own, "noisy", is_compiled=True)
        texts = [str(each.message) for each in caught]
        return found, len(called), [text for text in texts if "jit_compile" in text]

    expected = _expected("noisy")
    for found, called, texts in cluster(program):
        assert called == 0
        assert texts == [
            "Layer 'noisy' (Functional) is called eagerly, though `jit_compile=True`: "
            "its variables are in shards."
        ]
        assert_equal(found, expected)
