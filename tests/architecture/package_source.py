"""Syntax trees of the package, and names in them."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGE = "keras_strategies"
#: What methods call their own object.
OWN = ("self", "cls")


@dataclass(frozen=True)
class Module:
    """A file of source.

    Args:
        name: str, such as `"engines.jax.run"`.
        path: where it is.
        tree: its syntax tree.
    """

    name: str
    path: Path
    tree: ast.Module

    @property
    def is_compat(self) -> bool:
        """Whether private names of other packages may stand in it."""
        return any(part.endswith("compat") for part in self.name.split("."))

    @property
    def engine(self) -> str | None:
        """The engine that it is a part of, such as `"jax"`; None outside of engines."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 2 and parts[0] == "engines" else None

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of its syntax tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def defined(self) -> set[str]:
        """Names that it gives to functions, classes, variables and attributes."""
        found = set()
        for node in self.nodes:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(getattr(node, "ctx", None), ast.Store):
                if isinstance(node, ast.Name):
                    found.add(node.id)
                elif isinstance(node, ast.Attribute) and root_name(node) in OWN:
                    found.add(node.attr)
        return found

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    def is_foreign(self, node: ast.expr | None) -> bool:
        """Whether an object is reached from an import of another package."""
        return not self.imported.get(root_name(node) or "", PACKAGE).startswith(PACKAGE)

    @cached_property
    def imported(self) -> dict[str, str]:
        """Names that imports bind, and what they stand for."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.split(".")[0]
                    found[bound] = alias.name if alias.asname else bound
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        return found


class Source:
    """The modules of a package.

    Args:
        root: the folder of the package.
    """

    def __init__(self, root: Path):
        self.root = root
        self.modules = [
            Module(self._name(path), path, ast.parse(path.read_text()))
            for path in sorted(root.rglob("*.py"))
        ]
        self._by_name = {module.name: module for module in self.modules}
        self._by_class: dict[str, list[ast.ClassDef]] = {}
        for _, node in self.classes():
            self._by_class.setdefault(node.name, []).append(node)

    def _name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        is_folder = parts[-1] == "__init__" and len(parts) > 1
        return ".".join(parts[:-1] if is_folder else parts)

    def own(self, imported: str) -> str | None:
        """The module of the package that a full name is, or is in."""
        parts = imported.split(".")
        if parts[0] != PACKAGE:
            return None
        while len(parts) > 1:
            name = ".".join(parts[1:])
            if name in self._by_name:
                return name
            parts.pop()
        return "__init__"

    def classes(self) -> Iterator[tuple[Module, ast.ClassDef]]:
        for module in self.modules:
            for node in module.classes:
                yield module, node

    def imported_classes(self, module: Module) -> Iterator[ast.ClassDef]:
        """The package's classes that a module imports by name."""
        for full in module.imported.values():
            name = self.own(full)
            for node in self._by_name[name].classes if name in self._by_name else ():
                if full == f"{PACKAGE}.{name}.{node.name}":
                    yield node

    def with_bases(self, node: ast.ClassDef) -> list[ast.ClassDef]:
        """A class and the package's classes that it derives from."""
        found = [node]
        for each in found:
            for name in bases_of(each):
                found += [n for n in self._by_class.get(name, ()) if n not in found]
        return found

    def subclasses(self, *names: str) -> list[tuple[Module, ast.ClassDef]]:
        """Classes derived from the named ones, in any number of steps."""
        found: dict[int, tuple[Module, ast.ClassDef]] = {}
        known = set(names)
        while True:
            new = [
                (module, node)
                for module, node in self.classes()
                if id(node) not in found and bases_of(node) & known
            ]
            if not new:
                return list(found.values())
            found |= {id(node): (module, node) for module, node in new}
            known |= {node.name for _, node in new}


@functools.cache
def package_source() -> Source:
    """The package of this checkout, parsed once for all tests."""
    return Source(REPOSITORY / PACKAGE)


def dotted(node: ast.AST) -> str:
    """A name or a chain of attributes as it is written; empty for all else."""
    root = node
    while isinstance(root, ast.Attribute):
        root = root.value
    return ast.unparse(node) if isinstance(root, ast.Name) else ""


def bases_of(node: ast.ClassDef) -> set[str]:
    """Names of the bases of a class, those of TensorFlow with their module.

    `tf.distribute.MirroredStrategy` is not the class of this package.
    """
    bases = (b.value if isinstance(b, ast.Subscript) else b for b in node.bases)
    names = map(dotted, bases)
    return {n if n.startswith("tf.") else n.rpartition(".")[2] for n in names}


def members_of(node: ast.ClassDef) -> set[str]:
    """Methods and attributes that a class defines, in its body or on its objects."""
    found = set()
    for each in node.body:
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(each.name)
        elif isinstance(each, (ast.Assign, ast.AnnAssign)):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found | {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and dotted(each.value) in OWN
    }


def accessed(node: ast.AST) -> tuple[ast.expr | None, str] | None:
    """An object and its attribute that a node reads or sets, also by a string.

    Returns:
        A pair, with None for the unknown object of `operator.attrgetter`; None for
        another node.
    """
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if not isinstance(node, ast.Call):
        return None
    function, names = dotted(node.func), [*map(_string, node.args)]
    if function in ("getattr", "hasattr", "setattr", "delattr") and any(names[1:2]):
        return node.args[0], names[1]
    if function in ("attrgetter", "operator.attrgetter") and any(names[:1]):
        return None, names[0]
    return None


def _string(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def root_name(node: ast.expr | None) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
