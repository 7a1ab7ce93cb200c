"""State of threads and of the process in the Python code of Keras and the frameworks.

Found in the source: `threading.local` objects and classes, context variables, module
globals that functions bind again (`global`), and attributes of Keras's global state.
Containers of modules that functions change in place are found for Keras only: those of
the frameworks are registries and caches.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

#: The folder of each package's code.
FOLDERS = {"keras": "src", "jax": ".", "torch": ".", "tensorflow": "python"}
_LEFT_OUT = re.compile(r"(^|[._])(tests?|testing|test_\w+)($|[._])")
_WORTH_PARSING = re.compile(
    r"threading\.local|import local|ContextVar\(|^\s+global |global_attribute", re.M
)
_HAS_CONTAINERS = re.compile(r"^\w+(: .*)? = (\{|\[|\w+\()", re.M)
_CHANGES = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "insert",
        "pop",
        "popitem",
        "remove",
        "setdefault",
        "update",
    ]
)


def state_of(package: str) -> set[str]:
    """The names of all state that a package's source shows."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    found: set[str] = set()
    for path in sorted((root / FOLDERS[package]).rglob("*.py")):
        module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        if _LEFT_OUT.search(module):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if _WORTH_PARSING.search(text):
            tree = ast.parse(text)
            found |= {f"{module}.{name}" for name in _names(tree, "")}
            if package == "keras":
                found |= {f"keras state {name}" for name in _attributes(tree)}
        if package == "keras" and _HAS_CONTAINERS.search(text):
            tree = ast.parse(text)
            found |= {f"{module}.{name}" for name in _changed_containers(tree)}
    return found


def _names(node: ast.AST, scope: str) -> Iterator[str]:
    """Thread-locals, context variables and globals that functions bind."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            if any(ast.unparse(base) in _LOCALS for base in child.bases):
                yield scope + child.name
            yield from _names(child, f"{scope}{child.name}.")
        elif isinstance(child, ast.Global):
            yield from child.names
        elif isinstance(child, (ast.Assign, ast.AnnAssign)) and _is_state(child.value):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (scope + ast.unparse(target) for target in targets)
        elif _is_state(child):
            yield f"{scope}(unnamed)"
        else:
            yield from _names(child, scope)


_CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.Call)
_LOCALS = ("threading.local", "local")


def _is_state(node: ast.AST | None) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = ast.unparse(node.func)
    return called in _LOCALS or called.split(".")[-1] == "ContextVar"


def _changed_containers(tree: ast.Module) -> Iterator[str]:
    """Module variables that are changed in place."""
    own = {
        target.id
        for statement in tree.body
        if isinstance(statement, (ast.Assign, ast.AnnAssign))
        and isinstance(statement.value, _CONTAINERS)
        for target in ast.walk(statement)
        if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store)
    }
    if not own:
        return
    for node in ast.walk(tree):
        changed = None
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = node.func.value if node.func.attr in _CHANGES else None
        if isinstance(changed, ast.Name) and changed.id in own:
            yield changed.id


def _attributes(tree: ast.Module) -> Iterator[str]:
    """Attributes of Keras's global state, by the text of their names."""
    constants = {
        ast.unparse(statement.targets[0]): statement.value.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).split(".")[-1]
            if called in ("get_global_attribute", "set_global_attribute"):
                name = ast.unparse(node.args[0])
                is_text = isinstance(node.args[0], ast.Constant)
                yield str(node.args[0].value if is_text else constants.get(name, name))
