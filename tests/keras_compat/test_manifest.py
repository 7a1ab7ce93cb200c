"""Rows of the manifests agree with the installed packages, and with what is used.

`keras_compat` has those of Keras, `compat` of each engine those of the frameworks.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator

import keras
import pytest
from architecture.package_source import OWN, Module, accessed, package_source
from architecture.private_names import FRAMEWORKS

import keras_strategies as ks
from keras_strategies.errors import BackendError
from keras_strategies.keras_compat import patching
from keras_strategies.keras_compat.intrusions import INTRUSIONS
from keras_strategies.keras_compat.manifest import GROUPS, Patch
from keras_strategies.keras_compat.private_names import PRIVATE, Private

pytestmark = pytest.mark.one_backend

ROWS = [row for group in GROUPS.values() for row in group.patches]
PATCHES = [
    pytest.param(row, id=f"{row.owner.rpartition('.')[2]}.{row.name}") for row in ROWS
]
ENGINE = keras.backend.backend()
#: The file or files of the engine that use private names of its framework.
COMPAT = [
    module
    for module in package_source().modules
    if module.is_compat and module.engine == ENGINE and module.name.count(".") > 1
]
ROWS_OF: dict[str, tuple[Private, ...]] = {
    module.name: getattr(
        importlib.import_module(f"keras_strategies.{module.name}"), "PRIVATE_NAMES", ()
    )
    for module in COMPAT
}
ENGINE_ROWS = tuple(row for rows in ROWS_OF.values() for row in rows)
NAMES = [
    pytest.param(row, name, id=f"{row.owner.rpartition('.')[2]}.{name}")
    for row in (*PRIVATE, *ENGINE_ROWS)
    for name in row.names
]
#: Packages with classes that set attributes only visible in their source.
SOURCES = ("keras.src", *(f"{name}." for name in FRAMEWORKS[1:]))
#: Of TensorFlow's variables and of our own subclasses.
OTHERS = {"_is_assigned", "_kind", "_references"}


@pytest.mark.parametrize("row", PATCHES)
def test_a_replaced_attribute_has_its_signature(row: Patch) -> None:
    if not patching.is_present(row):
        pytest.skip("not of this backend or version")
    original = inspect.unwrap(vars(patching.owner_of(row))[row.name])
    found = str(inspect.signature(original))
    assert found in row.signature.split(" | "), (
        f"Keras {keras.__version__}: {row.owner}.{row.name} has the signature {found}; "
        f"{row.around} was written for {row.signature}"
    )


#: Public modules in which a class has the name that it has in its own.
PUBLIC = (keras, keras.layers, keras.metrics, keras.optimizers, keras.callbacks)
_OPS = "keras.src.ops.{0}.backend.ops.{0} | keras.src.ops.{0}.backend.{0}"
_TRAINERS, _SAVING = "keras.src.trainers.", "keras.src.saving."
_CONFUSION = "keras.src.metrics.confusion_metrics"
#: For each other owner a class or module that users, or modules of Keras, call it by.
CALLED = {
    f"{_TRAINERS}trainer.BaseTrainer | {_TRAINERS}trainer.Trainer": "keras.Model",
    "keras.src.models.model.Trainer": "keras.Model",
    "keras.src.models.model.Model": "keras.Sequential",
    "keras.src.models.functional.Functional": "keras.src.models.sequential.Functional",
    "keras.src.layers.layer.Layer": "keras.layers.Dense",
    "keras.src.optimizers.base_optimizer.BaseOptimizer": "keras.optimizers.Adam",
    f"{_TRAINERS}epoch_iterator.EpochIterator": (
        f"keras.src.backend.{ENGINE}.trainer."
        f"{ {'jax': 'JAX', 'tensorflow': 'TF', 'torch': 'Torch'}[ENGINE] }EpochIterator"
    ),
    f"{_SAVING}saving_api": f"{_SAVING}saving_api",
    f"{_SAVING}saving_lib": f"{_SAVING}saving_api.saving_lib",
    f"{_SAVING}saving_lib.H5IOStore": f"{_SAVING}saving_lib.H5IOStore",
    f"{_SAVING}saving_lib.ShardedH5IOStore": f"{_SAVING}saving_lib.ShardedH5IOStore",
    "keras.src.backend | keras.src.backend.ops": (
        f"{_SAVING}saving_lib.backend.ops | {_SAVING}saving_lib.backend"
    ),
    "keras.src.backend.{backend}.core | keras.src.backend.ops": (
        "keras.src.backend.common.remat.backend.ops | "
        "keras.src.backend.common.remat.backend.core"
    ),
    "keras.src.losses.loss": "keras.Loss",
    "keras.src.losses.loss.Loss": "keras.losses.MeanSquaredError",
    f"{_TRAINERS}compile_utils.CompileMetrics": f"{_TRAINERS}trainer.CompileMetrics",
    f"{_TRAINERS}compile_utils.MetricsList": f"{_TRAINERS}trainer.CompileMetrics",
    f"{_CONFUSION}._ConfusionMatrixConditionCount": "keras.metrics.TruePositives",
    f"{_CONFUSION}.SensitivitySpecificityBase": "keras.metrics.PrecisionAtRecall",
    "keras.src.metrics.iou_metrics._IoUBase": "keras.metrics.MeanIoU",
    **dict.fromkeys(
        (
            "keras.src.backend.jax.trainer",
            "keras.src.backend.jax.trainer.JAXEpochIterator",
            "keras.src.backend.tensorflow.trainer.TFEpochIterator",
            "keras.src.backend.torch.trainer.TorchEpochIterator",
        ),
        "keras.src.models.model.Trainer",
    ),
    "keras.src.backend.jax.distribution_lib": "keras.src.backend.distribution_lib",
    "keras.src.backend.{backend}.random": "keras.src.random.random.backend.random",
    "keras.src.backend.tensorflow.optimizer.TFOptimizer": "keras.optimizers.Adam",
    "keras.src.backend.torch.layer.TorchLayer": "keras.layers.Dense",
    "keras.src.backend.torch.core | keras.src.backend.torch.ops.core": (
        "keras.src.ops.core.backend.ops.core | keras.Variable"
    ),
    **{
        f"keras.src.backend.{of}.{name} | keras.src.backend.{of}.ops.{name}": (
            _OPS.format(name)
        )
        for of in ("{backend}", "jax", "torch")
        for name in ("numpy", "nn")
    },
}


def caller_of(owner: str) -> object:
    """What calls an owner's attributes, by a name other than the manifest's."""
    name = owner.rpartition(".")[2]
    found = [getattr(module, name, None) for module in PUBLIC]
    if owner in CALLED:
        found = [patching.resolved(name) for name in CALLED[owner].split(" | ")]
    return next(filter(None, found), None)


@pytest.mark.parametrize("row", PATCHES)
def test_a_replaced_attribute_is_the_one_that_keras_calls(row: Patch) -> None:
    """Keras has had copies of modules and classes that nothing calls."""
    if not patching.is_present(row):
        pytest.skip("not of this backend or version")
    owner = patching.owner_of(row)
    caller = caller_of(row.owner)
    assert caller is not None, row.owner
    kinds = getattr(caller, "__mro__", ())
    modules = [*map(inspect.getmodule, kinds)]
    assert owner in (caller, *kinds, *modules) or any(
        vars(module).get(owner.__name__) is owner for module in modules
    ), f"Keras calls {caller}, and {row.owner} is replaced"


def test_an_unlisted_version_of_keras_is_an_error(monkeypatch) -> None:
    patching.is_present.cache_clear()
    monkeypatch.setattr(keras, "__version__", "3.99.1")
    text = r"Keras 3\.99\.1 is installed.*3\.15"
    try:
        with pytest.raises(BackendError, match=text):
            patching.is_present(ROWS[0])
        strategy = ks.OneDeviceStrategy("cpu:0")
        with pytest.raises(BackendError, match=text):
            strategy.scope().__enter__()
    finally:
        patching.is_present.cache_clear()


@pytest.mark.parametrize(("row", "name"), NAMES)
def test_a_private_name_is_there(row: Private, name: str) -> None:
    if row.backend not in ("", ENGINE) or not keras.__version__.startswith(row.version):
        pytest.skip("not of this backend or version")
    owners = [patching.resolved(owner) for owner in row.owner.split(" | ")]
    package = sys.modules[row.owner.partition(".")[0]]
    assert any(hasattr(owner, name) or mentions(owner, name) for owner in owners), (
        f"{package.__name__} {package.__version__}: {row.owner} has no {name}. "
        f"Used for: {row.why}"
    )


def mentions(owner: object, name: str) -> bool:
    """Whether the module of a class, or of one of its bases, names an attribute."""
    modules = {inspect.getmodule(kind) for kind in getattr(owner, "__mro__", [owner])}
    return any(
        re.search(rf"\.{name}\b", inspect.getsource(module))
        for module in modules
        if module is not None and module.__name__.startswith(SOURCES)
    )


def used() -> Iterator[tuple[str, str]]:
    """Names of modules and attributes of Keras that `keras_compat` uses."""
    for module in package_source().modules:
        is_own = module.name.startswith("keras_compat")
        for node in module.nodes if is_own else ():
            for name in imported(node):
                if name.startswith("keras.src"):
                    yield module.name, name
            if name := foreign_name(module, node):
                yield module.name, name


def imported(node: ast.AST) -> list[str]:
    """The full names of what a node imports from modules."""
    if not isinstance(node, ast.ImportFrom) or not node.module:
        return []
    return [f"{node.module}.{alias.name}" for alias in node.names]


def foreign_name(module: Module, node: ast.AST) -> str:
    """The private attribute that a node reads or sets, unless it is own."""
    value, name = accessed(node) or (None, "")
    is_own = value and ast.unparse(value) in OWN and name in module.defined
    is_private = name.startswith("_") and not name.startswith("__")
    return name if is_private and not is_own else ""


def test_every_private_name_that_is_used_has_a_row() -> None:
    names = {name for row in PRIVATE for name in row.names} | OTHERS
    owners = {owner for row in (*PRIVATE, *ROWS) for owner in row.owner.split(" | ")}
    full = owners | {owner.rpartition(".")[0] for owner in owners}
    full |= {f"{row.owner}.{name}" for row in PRIVATE for name in row.names}
    missing = {
        (module, name)
        for module, name in used()
        if name not in (full if name.startswith("keras.src") else names)
    }
    assert not missing


def used_of_framework(module: Module) -> Iterator[str]:
    """Private modules and attributes that a compat file uses, by name."""
    for node in module.nodes:
        for full in imported(node):
            is_private = "._" in full or full.startswith("tensorflow.python")
            if is_private and full.startswith(ENGINE):
                yield full
        if name := foreign_name(module, node):
            yield name


@pytest.mark.parametrize("module", COMPAT, ids=lambda module: module.name)
def test_every_private_name_of_the_framework_that_is_used_has_a_row(
    module: Module,
) -> None:
    listed = {row.owner for row in ROWS_OF[module.name]}
    listed |= {part for owner in listed for part in owner.split(".")}
    for row in ROWS_OF[module.name]:
        listed |= {*row.names, *(f"{row.owner}.{name}" for name in row.names)}
    assert not {*used_of_framework(module)} - listed


def test_rows_are_unique_and_their_functions_exist() -> None:
    assert len({(row.owner, row.name) for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert callable(patching.function_of(row)), row.around
        assert row.why
        assert row.versions


def intrusions(module: Module) -> Iterator[str]:
    """The kinds of `Intrusion` that a module contains."""
    for node in module.nodes:
        match node:
            case ast.Attribute(attr="__class__", ctx=ast.Store()):
                yield "class"
            case ast.Call(
                func=ast.Attribute(attr="__setattr__"),
                args=[_, ast.Constant("__class__"), _],
            ):
                yield "class"
            case ast.Call(func=ast.Name("setattr"), args=[owner, *_]) if (
                module.is_foreign(owner) or ast.unparse(owner) == "module"
            ):
                yield "function"
            case ast.Call(func=ast.Attribute(attr="wrap_original")):
                yield "function"
            case ast.Call(func=function, args=[path, *_]) if ast.unparse(function) in (
                "os.listdir",
                "open",
            ) and "/proc/" in ast.unparse(path):
                yield "sockets"
            case ast.FunctionDef() if searches_text(node):
                yield "text"


def searches_text(function: ast.FunctionDef) -> bool:
    """Whether a function looks for words in the message of an error or a record."""

    def is_message(value: ast.AST) -> bool:
        given = ast.unparse(value)
        return given.startswith("str(") and ("error" in given or "record" in given)

    nodes = list(ast.walk(function))
    texts = {
        ast.unparse(target)
        for node in nodes
        if isinstance(node, ast.Assign) and is_message(node.value)
        for target in node.targets
    }
    # Also of the lines of a message.
    texts |= {
        ast.unparse(each.target)
        for node in nodes
        if isinstance(node, (ast.ListComp, ast.GeneratorExp))
        for each in node.generators
        if ast.unparse(each.iter).removesuffix(".splitlines()") in texts
    }
    return any(
        is_message(value) or ast.unparse(value) in texts
        for node in nodes
        if isinstance(node, ast.Compare)
        for operator, value in zip(node.ops, node.comparators, strict=True)
        if isinstance(operator, (ast.In, ast.NotIn))
    ) or any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("re.match", "re.search")
        and ast.unparse(node.args[-1]) in texts
        for node in nodes
    )


def test_every_other_intrusion_has_a_row() -> None:
    found = {
        (module.name, kind)
        for module in package_source().modules
        for kind in intrusions(module)
    }
    assert found == {(row.module, row.kind) for row in INTRUSIONS}
