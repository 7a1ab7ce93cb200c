"""`jit_compile=True` on Torch with several workers: all call programs, or none."""

from __future__ import annotations

import time
import warnings
from typing import Any
from unittest import mock

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
from multi_worker.clusters import model_parallel, one_device, with_clusters

from keras_strategies.engines.torch.data_parallel import compiled_calls


def called(strategy: Any, name: str) -> tuple[Any, int, list[str]]:
    """What comes of a training, how many programs it calls, and what it says."""
    with (
        graphs_without_compiler(),
        counted_programs() as programs,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        found = trained(strategy, name, is_compiled=True)
    texts = [str(each.message) for each in caught]
    return found, len(programs), [text for text in texts if "jit_compile" in text]


def check(every: list[Any], name: str, count: int, reason: str | None = None) -> None:
    """Workers call so many programs, with the numbers of one device."""
    expected = trained(one_device(), name, is_compiled=False)
    text = f"Layer {name!r} (Functional) is called eagerly, though `jit_compile=True`: "
    for found, programs, texts in every:
        assert programs == count
        assert reason is None or texts == [f"{text}{reason}."]
        assert_equal(found, expected)


@with_clusters(
    "name cluster",
    [
        ("residual", "two"),
        pytest.param("gpt", "two", marks=pytest.mark.nightly),
        pytest.param("noisy", "two_by_two", marks=pytest.mark.nightly),
    ],
)
def test_programs_of_workers_train_as_one_device(cluster, name) -> None:
    check(cluster(called, name), name, COMPILED * cluster.replicas // 2)


def test_a_worker_without_a_compiler_is_awaited_and_all_call_eagerly(cluster) -> None:
    """The slow one is named; the others wait for as long as it compiles."""

    def program(strategy: Any) -> Any:
        compile_ = compiled_calls._compile

        def slow(*arguments: Any) -> str:
            if strategy.cluster_resolver.task_id:
                time.sleep(1.0)
                return "InvalidCxxCompiler: no compiler"
            return compile_(*arguments)

        with mock.patch.multiple(compiled_calls, _compile=slow, _INTERVAL=0.1):
            return called(strategy, "residual")

    check(cluster(program), "residual", 0, "InvalidCxxCompiler: no compiler")


def test_variables_in_shards_are_named_and_train(cluster) -> None:
    found = cluster(lambda strategy: called(model_parallel(), "noisy"))
    check(found, "noisy", 0, "its variables are in shards")
