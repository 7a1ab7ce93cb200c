"""The public names: complete, documented, listed once, and printed readably."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
from pathlib import Path

import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.collectives import NcclAllReduce

pytestmark = pytest.mark.one_backend("jax")

STUB = Path(ks.__file__).with_suffix(".pyi")
CLUSTER = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}


def test_stub_is_shipped_and_sorted() -> None:
    statements = ast.parse(STUB.read_text()).body
    imports = [s for s in statements if isinstance(s, ast.ImportFrom)]
    modules = [str(s.module) for s in imports]
    assert modules == sorted(modules)
    # Only `import A as A` is a public name to a type checker.
    assert all(a.name == a.asname for s in imports for a in s.names)
    assert len(ks.__all__) == sum(len(s.names) for s in imports)


def test_dir_has_public_names_only() -> None:
    assert dir(ks) == sorted([*ks.__all__, "__version__"])
    for module in (ks.experimental, ks.coordinator, ks.cluster_resolver):
        assert dir(module) == sorted(module.__all__)


def test_misspelt_name_is_corrected() -> None:
    with pytest.raises(AttributeError, match="Did you mean 'MirroredStrategy'"):
        ks.MirroredStrategie  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute 'xyzzy'\.$"):
        ks.xyzzy  # noqa: B018


@pytest.mark.parametrize("name", ks.__all__)
def test_member_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(ks, name))


MODULES = ("cluster_resolver", "coordinator", "experimental")
OF_EXPERIMENTAL = ("experimental.coordinator", "experimental.partitioners")


@pytest.mark.parametrize("path", [*MODULES, *OF_EXPERIMENTAL])
def test_modules_of_tf_distribute_can_be_imported(path: str) -> None:
    module = importlib.import_module(f"keras_strategies.{path}")
    assert operator.attrgetter(path)(ks) is module
    assert all(hasattr(module, name) for name in module.__all__)


def test_names_in_modules_are_the_same_objects() -> None:
    assert ks.experimental.CentralStorageStrategy is ks.CentralStorageStrategy
    assert ks.coordinator.ClusterCoordinator is ks.ClusterCoordinator
    assert ks.coordinator.PerWorkerValue is ks.PerWorkerValues
    assert ks.coordinator.RemoteValue is ks.RemoteValue
    index = ks.coordinator.experimental_get_current_worker_index
    assert index is ks.get_current_worker_index


def test_error_tree_keeps_the_builtin_types() -> None:
    for value in vars(ks.errors).values():
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, ks.errors.KerasStrategiesError)
    assert issubclass(ks.errors.UnknownDeviceError, ValueError)
    assert issubclass(ks.errors.MixedStrategyError, RuntimeError)


def test_dir_of_a_strategy_has_what_users_need(mirrored) -> None:
    found = set(dir(mirrored))
    assert {"scope", "run", "reduce", "gather", "extended", "describe"} <= found
    assert not {"placement", "trainer", "owns", "created", "backend"} & found
    assert not [name for name in found if name.startswith("_")]
    assert all(hasattr(mirrored, name) for name in found)


def test_only_strategies_are_set_and_the_default_one_is_none() -> None:
    with pytest.raises(ValueError, match="Received: 'x' of type str"):
        ks.experimental_set_strategy("x")  # type: ignore[arg-type]
    assert ks.DefaultStrategy() is ks.get_strategy()
    assert ks.DefaultStrategy() is ks.DefaultStrategy()
    ks.experimental_set_strategy(ks.DefaultStrategy())
    assert not ks.has_strategy()


def test_objects_print_what_they_are(mirrored, monkeypatch) -> None:
    """Those of each class that people see in a prompt."""
    monkeypatch.setenv("KS_CLUSTER_SECRET", "a secret of many characters")
    dataset = mirrored.experimental_distribute_dataset(np.zeros(10), batch_size=4)
    known, failed = ks.RemoteValue(), ks.RemoteValue()
    known.set(3.5, None)
    failed.set(None, ValueError("too large"))
    iterator = iter(dataset)
    iterator.close()
    printed = {
        "<RemoteValue, not yet computed>": ks.RemoteValue(),
        "<RemoteValue of 3.5>": known,
        "<RemoteValue, failed: ValueError: too large>": failed,
        "<Server of worker 0 at b:1>": ks.Server(CLUSTER, "worker", 0),
        f"<StrategyExtended of {mirrored!r}>": mirrored.extended,
        "<DistributedDataset of 3 batches on cpu:0, cpu:1>": dataset,
        f"<DistributedIterator, ended, over {dataset!r}>": iterator,
        "<NcclAllReduce(num_packs=2)>": NcclAllReduce(2),
    }
    for text, made in printed.items():
        assert repr(made).startswith(text)
        assert " at 0x" not in repr(made)
