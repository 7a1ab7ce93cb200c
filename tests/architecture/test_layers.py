"""The rooms and their layers: imports point up the list, never down."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "keras_strategies"

# Each layer imports only what is above it, and its own. The first prefix that fits a
# module says where it belongs.
LAYERS = (
    ("errors", "types", "reports.tables", "devices", "keras_compat"),
    ("values", "layouts", "cluster", "input.row_splits", "input.worker_shares"),
    ("runtime.base",),
    ("runtime", "engines", "collectives", "context"),
    ("processes",),
    ("input", "reports"),
    ("training",),
    ("strategies",),
    ("parameter_server",),
    (
        "__init__",
        "__main__",
        "coordinator",
        "cluster_resolver",
        "experimental",
        "tools",
    ),
)
FRAMEWORKS = {"jax": "jax", "torch": "torch", "tensorflow": "tensorflow"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


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
    assert best is not None, f"{module} is in no layer; add its room to LAYERS"
    return best[1]


def imports(path: Path, *, nested: bool) -> Iterator[str]:
    """Absolute names that a file imports, but for those under TYPE_CHECKING."""
    skipped = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(ast.walk(node))
        if not nested and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            skipped.update(ast.walk(node))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own(imported: str) -> str | None:
    """The module of this package that an imported name belongs to."""
    if not imported.startswith("keras_strategies."):
        return None
    parts = imported.split(".")[1:]
    while parts:
        base = ROOT.joinpath(*parts)
        if base.with_suffix(".py").exists() or (base / "__init__.py").exists():
            return ".".join(parts)
        parts.pop()
    return "__init__"


def assert_none(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_imports_point_up() -> None:
    # `engines` chooses an engine by its name, so it is the one module that names them.
    assert_none(
        [
            f"{name_of(path)} imports {target}, which is in a layer below its own"
            for path in modules()
            if name_of(path) != "engines"
            for target in filter(None, map(own, imports(path, nested=True)))
            if layer_of(target) > layer_of(name_of(path))
        ]
    )


def test_only_keras_compat_names_keras_src() -> None:
    assert_none(
        [
            f"{name_of(path)} imports {imported}"
            for path in modules()
            if name_of(path).split(".")[0] != "keras_compat"
            for imported in imports(path, nested=True)
            if "keras.src" in imported
        ]
    )


def test_frameworks_are_imported_by_their_own_room_only() -> None:
    assert_none(
        [
            f"{name_of(path)} imports {imported} at module level"
            for path in modules()
            for imported in imports(path, nested=False)
            if (framework := FRAMEWORKS.get(imported.split(".")[0])) is not None
            and not name_of(path).startswith(
                (f"engines.{framework}", f"parameter_server.engines.{framework}_")
            )
        ]
    )


def test_resolvers_and_launcher_need_the_standard_library_only() -> None:
    # Clients of services and cloudpickle are imported by the functions that use them.
    allowed = {*sys.stdlib_module_names, "keras_strategies"}
    assert_none(
        [
            f"{name_of(path)} imports {imported} at module level"
            for path in modules()
            if name_of(path).startswith(("cluster", "processes", "tools"))
            for imported in imports(path, nested=False)
            if imported.split(".")[0] not in allowed
        ]
    )


def test_the_test_would_find_an_import_that_points_down(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("from keras_strategies.strategies.base import Strategy\n")
    (imported,) = imports(bad, nested=True)
    assert own(imported) == "strategies.base"
    assert layer_of("strategies.base") > layer_of("errors")
