"""Layers of the package: folders import lower ones, and modules form no cycle.

The layers are the rows of the figure in the package's README (`figure.py`).

Imports inside functions, under TYPE_CHECKING and by string count as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from architecture.figure import GROUPS, LAYERS, box_of, height_of
from architecture.import_graph import cycles, import_graph
from architecture.package_source import PACKAGE, Module, Source, package_source
from architecture.private_names import FRAMEWORKS

pytestmark = pytest.mark.one_backend("jax")

GRAPH = import_graph(package_source())


def upward(graph: dict[str, set[str]]) -> list[str]:
    """Imports of another folder that does not lie in a lower layer."""
    return [
        f"{module} imports {target}, which is in no lower layer"
        for module, targets in graph.items()
        for target in sorted(targets)
        if box_of(module) != box_of(target)
        and height_of(box_of(module)) <= height_of(box_of(target))
    ]


def imports(module: Module) -> Iterator[str]:
    """Absolute names that a module imports at module level when it runs."""
    rest: list[ast.AST] = [module.tree]
    while rest:
        node = rest.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not _runs_later(node):
            rest += ast.iter_child_nodes(node)


def _runs_later(node: ast.AST) -> bool:
    """Whether importing the module does not run what is in a node."""
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.expr)) or (
        isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    )


def assert_none(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_imports_point_down() -> None:
    assert_none(upward(GRAPH))


def test_each_folder_lies_in_one_layer() -> None:
    boxes = [box for layer in LAYERS for box in layer]
    tops = [top for box in boxes for top in GROUPS.get(box, {box})]
    assert sorted(tops) == sorted({name.partition(".")[0] for name in GRAPH})


def test_there_are_no_cycles() -> None:
    assert_none([str(cycle) for cycle in cycles(GRAPH)])


def test_only_keras_compat_names_keras_src() -> None:
    assert_none(
        [
            f"{module.name} imports {name}"
            for module in package_source().modules
            if module.name.split(".")[0] != "keras_compat"
            for node in module.nodes
            if isinstance(node, (ast.Import, ast.ImportFrom))
            if "keras.src" in (name := ast.unparse(node))
        ]
    )


def test_frameworks_are_imported_by_their_own_engine_only() -> None:
    assert_none(
        [
            f"{module.name} imports {imported} at module level"
            for module in package_source().modules
            for imported in imports(module)
            if (framework := imported.split(".")[0]) in FRAMEWORKS[1:]
            and not module.name.startswith(
                (f"engines.{framework}", f"parameter_server.engines.{framework}_")
            )
            # Loaders are Torch's on each backend, and are imported where one is given.
            and (framework, module.name.partition(".")[0]) != ("torch", "loaders")
        ]
    )


def test_resolvers_and_launcher_need_the_standard_library_only() -> None:
    # Clients of services and cloudpickle are imported by the functions that use them.
    allowed = {*sys.stdlib_module_names, PACKAGE}
    assert_none(
        [
            f"{module.name} imports {imported} at module level"
            for module in package_source().modules
            if module.name.startswith(("cluster", "lead", "processes", "tools"))
            for imported in imports(module)
            if imported.split(".")[0] not in allowed
        ]
    )


def test_imports_of_every_kind_are_seen(tmp_path: Path) -> None:
    (tmp_path / "strategies.py").write_text("")
    (tmp_path / "values.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        f"    from {PACKAGE}.strategies import Strategy\n"
    )
    (tmp_path / "devices.py").write_text(f'ENTRY = "{PACKAGE}.strategies:main"\n')
    late = f"def late():\n    import {PACKAGE}.strategies\n"
    (tmp_path / "types.py").write_text(late)
    graph = import_graph(Source(tmp_path))
    assert len(upward(graph)) == 3
    graph["strategies"].add("types")
    assert cycles(graph) == [["strategies", "types"]]
