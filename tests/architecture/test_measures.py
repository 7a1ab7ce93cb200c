"""Measures of the structure stay at or below what has been reached."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from architecture.import_graph import cycles
from architecture.measures import (
    interface_members,
    lines,
    listed_private_names,
    measures,
    overriding_classes,
    replaced_attributes,
    required_members,
    temporary_attributes,
)
from architecture.package_source import Module, Source, package_source
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
    "import cycles": 0,
    "modules in import cycles": 0,
    "private names outside of compat files": 0,
    "private names of Keras and frameworks": 268,
    # The manifest, a table.
    "files of more than 500 lines of code": 1,
}


def test_private_names_are_used_in_compat_files_only() -> None:
    assert not private_names(package_source())


def test_no_measure_has_grown() -> None:
    found = measures(package_source())
    grown = [
        f"{name}: {found[name]}, at most {bound}"
        for name, bound in BOUNDS.items()
        if found[name] > bound
    ]
    assert not grown, "\n".join(grown)


def package(root: Path, **files: str) -> Source:
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Source(root)


def test_members_are_what_engines_implement_of_abstract_classes(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        runtime__base="class Base(ABC):\n @abstractmethod\n def a(self): ...\n"
        " def shared(self): ...\n"
        "class Backend(Base):\n def b(self): ...\n def c(self): ...\n"
        "class Other(ABC):\n @abstractmethod\n def d(self): ...\n",
        engines__jax__backend="class JaxBackend(Backend):\n def b(self): ...\n",
    )
    assert interface_members(source) == {
        "runtime.base.Backend": 1,
        "runtime.base.Base": 1,
    }


def test_required_members_are_abstract_ones_of_an_engine(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        runtime__engine="class Engine(ABC):\n @abstractmethod\n def a(self): ...\n"
        " @property\n @abstractmethod\n def b(self): ...\n def c(self): ...\n",
        runtime__drivers="class FitDriver(ABC):\n @abstractmethod\n def d(self): ...\n"
        "class RollbackDriver(ABC):\n @abstractmethod\n def e(self): ...\n",
    )
    assert required_members(source) == 3


def test_replaced_attributes_are_counted_through_loops(tmp_path: Path) -> None:
    source = package(
        tmp_path,
        keras_compat__hooks="NAMES = ('fit', 'evaluate')\n"
        "def install():\n replace(Layer, 'call', f)\n"
        " for name in NAMES:\n  replace(Trainer, name, f)\n",
        other="import ray\nray.x.y = 1\n",
    )
    assert replaced_attributes(source) == {"keras_compat.hooks": 3, "other": 1}


def test_replaced_attributes_are_counted_in_a_manifest(tmp_path: Path) -> None:
    text = "A = Group('', (Patch(), Patch()))\n"
    text += "B = Group('', (Patch(),), is_temporary=True)\n"
    source = package(tmp_path, keras_compat__manifest=text)
    assert replaced_attributes(source) == {"keras_compat.manifest": 2}
    assert temporary_attributes(source) == 1


def test_private_names_are_counted_in_tables(tmp_path: Path) -> None:
    text = "A = (Private('torch', ('_a', '_b'), ''), Private('keras.src', ('c',), ''))"
    assert listed_private_names(package(tmp_path, compat=text)) == 3


def test_lines_are_counted_by_kind(tmp_path: Path) -> None:
    text = '"""Doc."""\n\nimport os  # a\n\n# b\nx = """\n\n"""\n'
    text += "\nif x:\n    raise E(\n1)\n"
    assert lines(package(tmp_path, a=text)) == {
        "docstrings": 1,
        "blank": 3,
        "imports": 1,
        "comments": 1,
        "code": 4,
        "raises": 2,
    }


def test_cycles_are_groups_of_modules() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert cycles(graph) == [["b", "c"]]


def test_private_names_of_frameworks_are_found_and_own_ones_are_not(
    tmp_path: Path,
) -> None:
    source = package(
        tmp_path,
        a="from jax._src import core\nimport torch\n"
        "class A:\n def f(self, v):\n  self._own = v._value\n  torch._C.g(v._own)\n",
        compat="def f(variable):\n return variable._value\n",
    )
    assert private_names(source) == ["a:1 jax._src.core", "a:5 _value", "a:6 _C"]


def test_a_private_name_is_own_only_where_the_package_defines_it(
    tmp_path: Path,
) -> None:
    """A name of another module's objects, of a base or of a function says nothing."""
    source = package(
        tmp_path,
        addresses="class A:\n def f(self):\n  self._version = 0\n",
        tensors="def f(tensor):\n return tensor._version\n",
        rates="def _rate(optimizer):\n return getattr(optimizer, '_rate')\n",
        getters="import operator\nversion = operator.attrgetter('_version')\n",
        b="from keras_strategies.addresses import A\n"
        "class B(A):\n def f(self, a):\n  return self._version, a._version\n",
        c="import keras\nclass C(keras.Layer):\n def f(self):\n  self._path\n",
    )
    assert private_names(source) == [
        "c:4 _path",
        "getters:2 _version",
        "rates:2 _rate",
        "tensors:2 _version",
    ]


def test_a_module_of_the_package_is_known_by_its_name(tmp_path: Path) -> None:
    source = package(tmp_path, engines__jax__run="", engines__jax____init__="")
    assert source.own("keras_strategies.engines.jax.run.fn") == "engines.jax.run"
    assert source.own("keras.ops") is None
    assert Module("engines.jax.run", tmp_path, ast.parse("")).engine == "jax"


def test_overriding_classes_are_those_that_replace_what_a_base_does(
    tmp_path: Path,
) -> None:
    source = package(
        tmp_path,
        base="class Base(ABC):\n def __init__(self): a()\n"
        " @abstractmethod\n def must(self): ...\n"
        " def may(self): return None\n def does(self): return work(self)\n",
        good="class Good(Base):\n def __init__(self): b()\n"
        " def must(self): c()\n def may(self): return 3\n",
        bad="class Bad(Good):\n def does(self): d()\n def must(self): e()\n",
    )
    assert overriding_classes(source) == {"bad.Bad": ["does", "must"]}
