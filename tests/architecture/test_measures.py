"""Measures of the structure stay at or below what has been reached."""

from __future__ import annotations

from pathlib import Path

import pytest
from architecture.measures import measures
from architecture.package_source import Source, package_source
from architecture.private_names import private_names

pytestmark = pytest.mark.one_backend("jax")

#: Bounds from above. They only go down.
BOUNDS = {
    # 16 of them for workers that are lost and join in `fit`, 3 in custom loops. Those
    # of classes that only other interfaces derive from are counted since all engines
    # share `ReplicaRun`. One for the gradient of
    # batch statistics, a third of TensorFlow's operations, one for components that are
    # one array on JAX. One for the status of collectives, one for accelerators that
    # are left to other processes, one for the device of operations. One for variables
    # that a loop holds, in place of three questions for the name of the backend. One
    # for sums that replicas exchange in `run`.
    "members of engine interfaces": 112,
    # Those of `Engine`, `FitDriver`, `RunDriver` and `ReplicaCollectives`.
    "required members of an engine": 19,
    # One is the gradient of max pooling, which XLA partitions wrong along the rows.
    "attributes replaced for the process": 27,
    # While a step, a scope or a save is open. One is `repeat` on Torch's device "meta",
    # without which each worker calls models with `UpSampling2D` on all rows, one a loss
    # that copies all logits. One is how keras_hub reads files of presets. One registers
    # values after `quantize`, which a plan has none of. Two open the weights of large
    # models at their place in the archive, which halves what a save writes.
    "attributes replaced for a time": 37,
    "StatelessScope subclasses": 1,
    "communicators": 2,
    # Defaults of optional methods are none.
    "classes that override a concrete method": 15,
    # `process_group`, the lead, which outlives its starter, and the fork server of the
    # tests.
    "modules that start processes": 3,
    "duplicate public class names": 0,
    "private names outside of compat files": 0,
    "private names of Keras and frameworks": 268,
    # The manifest, a table.
    "files of more than 500 lines of code": 1,
}


def test_no_measure_has_grown() -> None:
    found = measures(package_source())
    grown = [
        f"{name}: {len(found[name])}, at most {bound}: {found[name]}"
        for name, bound in BOUNDS.items()
        if len(found[name]) > bound
    ]
    assert not grown, "\n".join(grown)


def package(root: Path, **files: str) -> Source:
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Source(root)


def test_private_names_of_frameworks_are_found_and_own_ones_are_not(tmp_path) -> None:
    source = package(
        tmp_path,
        a="from jax._src import core\nimport torch\n"
        "class A:\n def f(self, v):\n  self._own = v._value\n  torch._C.g(v._own)\n",
        compat="def f(variable):\n return variable._value\n",
    )
    assert private_names(source) == ["a:1 jax._src.core", "a:5 _value", "a:6 _C"]
