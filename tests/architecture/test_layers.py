"""Layers of the package: every import points down, and modules form no cycle.

Imports inside functions, under TYPE_CHECKING and by string count as well.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from architecture.import_graph import cycles, import_graph
from architecture.package_source import PACKAGE, Module, Source, package_source

# From the bottom up: a module imports only its own layer and those before it in this
# list. The longest prefix of a module's name decides its layer.
LAYERS = (
    ("errors", "user_warnings"),
    ("types", "devices", "values", "layouts", "reports.tables", "keras_compat"),
    ("cluster", "input.row_splits", "runtime.replicas.replica_counts"),
    ("processes",),
    ("runtime.elastic_loop", "runtime.worker_steps"),
    ("runtime.workers",),
    ("runtime.placement",),
    ("runtime.drivers", "runtime.replicas.collectives"),
    ("runtime.engine",),
    (
        "context",
        "runtime",
        "collectives.packing",
        "collectives.tensor_packs",
        "collectives.call_options",
        "collectives.replica_ops",
    ),
    ("engines.jax", "engines.torch", "engines.tensorflow"),
    ("engines",),
    ("collectives", "input"),
    ("reports", "training"),
    ("strategies",),
    ("parameter_server",),
    (
        "__init__",
        "__main__",
        "callbacks",
        "cluster_resolver",
        "coordinator",
        "experimental",
        "tools",
    ),
)
FRAMEWORKS = {"jax": "jax", "torch": "torch", "tensorflow": "tensorflow"}


def graph_of(source: Source) -> dict[str, set[str]]:
    """All imports between modules, strings that name a module included."""
    graph = import_graph(source)
    for module in source.modules:
        for node in module.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                name = node.value.partition(":")[0]
                target = source.own(name) if name.startswith(f"{PACKAGE}.") else None
                if target and target != module.name and name.endswith(target):
                    graph[module.name].add(target)
    return graph


GRAPH = graph_of(package_source())


def layer_of(module: str) -> int:
    best = max(
        (
            (len(prefix), i)
            for i, prefixes in enumerate(LAYERS)
            for prefix in prefixes
            if module == prefix or module.startswith(f"{prefix}.")
        ),
        default=None,
    )
    assert best is not None, f"{module} is in no layer; add its folder to LAYERS"
    return best[1]


def upward(graph: dict[str, set[str]]) -> list[str]:
    return [
        f"{module} imports {target}, which is in a higher layer"
        for module, targets in graph.items()
        for target in sorted(targets)
        if layer_of(target) > layer_of(module)
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
            for name in [ast.unparse(node)]
            if "keras.src" in name
        ]
    )


def test_frameworks_are_imported_by_their_own_engine_only() -> None:
    assert_none(
        [
            f"{module.name} imports {imported} at module level"
            for module in package_source().modules
            for imported in imports(module)
            if (framework := FRAMEWORKS.get(imported.split(".")[0])) is not None
            and not module.name.startswith(
                (f"engines.{framework}", f"parameter_server.engines.{framework}_")
            )
        ]
    )


def test_resolvers_and_launcher_need_the_standard_library_only() -> None:
    # Clients of services and cloudpickle are imported by the functions that use them.
    allowed = {*sys.stdlib_module_names, PACKAGE}
    assert_none(
        [
            f"{module.name} imports {imported} at module level"
            for module in package_source().modules
            if module.name.startswith(("cluster", "processes", "tools"))
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
    (tmp_path / "types.py").write_text(
        f"def late():\n    import {PACKAGE}.strategies\n"
    )
    graph = graph_of(Source(tmp_path))
    assert len(upward(graph)) == 3
    graph["strategies"].add("types")
    assert cycles(graph) == [["strategies", "types"]]
