"""Measures of the package's structure, counted from its source.

python tests/architecture/measures.py [root of a checkout]
"""

from __future__ import annotations

import ast
import functools
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

REPOSITORY = Path(__file__).parents[2]
PACKAGE = "keras_strategies"
FRAMEWORKS = ("keras", "jax", "torch", "tensorflow")
#: Folders of engines, by today's name and the former one.
ENGINE_FOLDERS = ("engines", "backends")
#: Underscored names that are documented.
DOCUMENTED = {"_fields", "_asdict", "_replace", "_make", "_exit"}
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
        parts = self.name.split(".")
        return "keras_compat" in parts or parts[-1].endswith("compat")

    @property
    def engine(self) -> str | None:
        """The engine that it is a part of, such as `"jax"`; None outside of engines."""
        parts = self.name.split(".")
        inside = len(parts) > 2 and parts[0] in ENGINE_FOLDERS
        return parts[1] if inside else None

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
                elif isinstance(node, ast.Attribute) and _root(node) in OWN:
                    found.add(node.attr)
        return found

    def is_foreign(self, node: ast.Attribute) -> bool:
        """Whether an attribute is reached from an import of another package."""
        return not self.imported.get(_root(node) or "", PACKAGE).startswith(PACKAGE)

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
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    yield module, node

    def subclasses(self, *names: str) -> list[tuple[Module, ast.ClassDef]]:
        """Classes derived from the named ones, in any number of steps."""
        found: dict[int, tuple[Module, ast.ClassDef]] = {}
        known = set(names)
        while True:
            new = [
                (module, node)
                for module, node in self.classes()
                if id(node) not in found and _bases(node) & known
            ]
            if not new:
                return list(found.values())
            found |= {id(node): (module, node) for module, node in new}
            known |= {node.name for _, node in new}


@functools.cache
def package_source() -> Source:
    """The package of this checkout, parsed once for all tests."""
    return Source(REPOSITORY / PACKAGE)


def _dotted(node: ast.AST) -> str:
    """A name or a chain of attributes as it is written; empty for all else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def _bases(node: ast.ClassDef) -> set[str]:
    bases = (b.value if isinstance(b, ast.Subscript) else b for b in node.bases)
    return {_dotted(base).rsplit(".", 1)[-1] for base in bases}


def interface_members(source: Source) -> dict[str, int]:
    """Public members of abstract classes that engines implement.

    These are members of classes from which engines derive, in any number of steps, that
    are abstract or that an engine overrides.
    """
    shared = {n.name: (m, n) for m, n in source.classes() if m.engine is None}
    overridden: dict[str, set[str]] = defaultdict(set)
    for module, node in source.classes():
        if module.engine is not None:
            for name in _ancestors(node, shared):
                overridden[name] |= {each.name for each in _functions(node)}
    found = {}
    for name, names in overridden.items():
        module, node = shared[name]
        own = {f.name: f for f in _functions(node) if not f.name.startswith("_")}
        members = {each for each in own if each in names or _is_abstract(own[each])}
        if _is_interface(node, shared):
            found[f"{module.name}.{name}"] = len(members)
    return found


def _ancestors(
    node: ast.ClassDef, shared: dict[str, tuple[Module, ast.ClassDef]]
) -> set[str]:
    direct = _bases(node) & set(shared)
    return direct.union(*(_ancestors(shared[name][1], shared) for name in direct))


def _is_interface(
    node: ast.ClassDef, shared: dict[str, tuple[Module, ast.ClassDef]]
) -> bool:
    every = [node, *(shared[name][1] for name in _ancestors(node, shared))]
    return any(_bases(each) & {"ABC", "Protocol"} for each in every)


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def _is_abstract(function: ast.FunctionDef) -> bool:
    return any("abstractmethod" in ast.unparse(d) for d in function.decorator_list)


def _repetitions(module: Module, node: ast.expr) -> int:
    """How many elements a literal, or a constant of a module, has."""
    if isinstance(node, ast.Name):
        for each in module.tree.body:
            if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == node.id:
                return _repetitions(module, each.value)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return len(node.elts)
    if isinstance(node, ast.Dict):
        return len(node.keys)
    return 1


def _calls(module: Module, names: Iterable[str]) -> int:
    """Calls of functions by name, each as often as literal loops around it repeat."""
    total = 0

    def visit(node: ast.AST, times: int) -> None:
        nonlocal total
        if isinstance(node, ast.For):
            times *= _repetitions(module, node.iter)
        comprehensions = getattr(node, "generators", [])
        for each in comprehensions:
            times *= _repetitions(module, each.iter)
        if isinstance(node, ast.Call) and _dotted(node.func) in names:
            total += times
        for child in ast.iter_child_nodes(node):
            visit(child, times)

    visit(module.tree, 1)
    return total


def replaced_attributes(source: Source) -> dict[str, int]:
    """Attributes of other packages that are replaced for the whole process."""
    found = {}
    for module in source.modules:
        if module.name.startswith("keras_compat"):
            groups = _groups(module, is_temporary=False)
            count = sum(groups) if groups else _calls(module, ("replace",))
        else:
            count = len(list(_foreign_assignments(module)))
        if count:
            found[module.name] = count
    return found


def temporary_attributes(source: Source) -> int:
    """Attributes of Keras that are replaced while a block of code runs."""
    return sum(
        sum(_groups(module, is_temporary=True))
        for module in source.modules
        if module.name.startswith("keras_compat")
    )


def _groups(module: Module, *, is_temporary: bool) -> list[int]:
    """Sizes of a manifest's groups of patches."""
    return [
        sum(isinstance(n, ast.Call) and _dotted(n.func) == "Patch" for n in nodes)
        for node in module.nodes
        if isinstance(node, ast.Call) and _dotted(node.func) == "Group"
        for nodes in [list(ast.walk(node))]
        if is_temporary == any(each.arg == "is_temporary" for each in node.keywords)
    ]


def _foreign_assignments(module: Module) -> Iterator[str]:
    """Assignments to attributes of what is imported from another package."""
    for node in module.nodes:
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            continue
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        for target in targets:
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                root = _root(target)
                name = module.imported.get(root or "", "")
                if name and not name.startswith(PACKAGE) and name != "os":
                    yield ast.unparse(target)


def _root(node: ast.expr) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def communicators(source: Source) -> list[str]:
    """Implementations of the replicas' collectives that no engine has."""
    found = source.subclasses("Communicator", "ReplicaCollectives")
    return [f"{m.name}.{n.name}" for m, n in found if m.engine is None]


def launchers(source: Source) -> list[str]:
    """Modules that start or fork processes, those of the tests' harness too."""
    harness = source.root.parent / "tests" / "harness"
    modules = [*source.modules]
    if harness.is_dir():
        modules += Source(harness).modules
    starts = {"subprocess.Popen", "os.fork", "os.posix_spawn"}
    return [
        module.name
        for module in modules
        if any(
            isinstance(node, ast.Call)
            and (
                _dotted(node.func) in starts
                or (
                    isinstance(node.func, ast.Attribute)
                    and node.func.attr == "Process"
                    # The handle of a process that runs.
                    and _dotted(node.func) != "psutil.Process"
                )
            )
            for node in module.nodes
        )
    ]


def duplicate_classes(source: Source) -> list[str]:
    """Public names that classes of several modules have."""
    places = defaultdict(set)
    for module in source.modules:
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(module.name)
    return sorted(name for name, found in places.items() if len(found) > 1)


def lines(source: Source) -> Counter[str]:
    """Lines by kind: code, imports, raises, docstrings, comments and blank."""
    total: Counter[str] = Counter()
    for module in source.modules:
        text = module.path.read_text()
        kinds = dict.fromkeys(range(1, len(text.splitlines()) + 1), "blank")
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            for i in range(token.start[0], token.end[0] + 1):
                if token.type == tokenize.COMMENT and kinds.get(i) == "blank":
                    kinds[i] = "comments"
                elif token.string.strip() and token.type != tokenize.COMMENT:
                    kinds[i] = "code"
        for node in module.nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                _mark(kinds, node, "imports")
            elif isinstance(node, ast.Raise):
                _mark(kinds, node, "raises")
            elif _has_docstring(node):
                _mark(kinds, node.body[0], "docstrings")
        total.update(kinds.values())
    return total


def _has_docstring(node: ast.AST) -> TypeGuard[ast.Module]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None


def _mark(kinds: dict[int, str], node: ast.stmt, kind: str) -> None:
    for i in range(node.lineno, (node.end_lineno or node.lineno) + 1):
        kinds[i] = kind


def files_per_folder(source: Source) -> Counter[str]:
    return Counter(
        str(module.path.parent.relative_to(source.root)) for module in source.modules
    )


def import_graph(source: Source) -> dict[str, set[str]]:
    """What each module imports: ordinarily, for types only, or by a string."""
    graph: dict[str, set[str]] = {}
    for module in source.modules:
        names: set[str] = set()
        for node in module.nodes:
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Call) and "import_module" in _dotted(node.func):
                names.update(
                    each.value
                    for each in node.args
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                )
        targets = {source.own(name) for name in names} - {None, module.name}
        graph[module.name] = {target for target in targets if target}
    return graph


def _is_import(function: ast.expr) -> bool:
    return _dotted(function).rsplit(".", 1)[-1] == "import_module"


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected groups of more than one module (Tarjan)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        stack.append(name)
        for target in graph[name]:
            if target not in numbers:
                visit(target)
                lowest[name] = min(lowest[name], lowest[target])
            elif target in stack:
                lowest[name] = min(lowest[name], numbers[target])
        if lowest[name] == numbers[name]:
            place = stack.index(name)
            group = sorted(stack[place:])
            del stack[place:]
            if len(group) > 1:
                found.append(group)

    for name in graph:
        if name not in numbers:
            visit(name)
    return found


def private_names(source: Source) -> list[str]:
    """Private names of the frameworks outside of the files that are for them."""
    own: set[str] = set()
    for module in source.modules:
        if not module.is_compat:
            own |= module.defined
    for module in source.modules:
        own -= _held_by_compat(module)
    return sorted(
        f"{module.name}:{line} {name}"
        for module in source.modules
        if not module.is_compat
        for line, name in {*_private_imports(module), *_private_uses(module, own)}
    )


def _private_imports(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *rest = name.split(".")
            is_private = any(part.startswith("_") for part in rest)
            if package in FRAMEWORKS and (
                is_private or name.startswith(("keras.src", "tensorflow.python"))
            ):
                yield node.lineno, name


def _private_uses(module: Module, own: set[str]) -> Iterator[tuple[int, str]]:
    """Underscored attributes of objects that are not the package's own."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute):
            line, name = node.lineno, node.attr
            if _dotted(node.value) in OWN and name in module.defined:
                continue
            is_foreign = module.is_foreign(node)
            if ast.unparse(node.value).endswith("aten"):
                continue  # The names of Torch's operations are public.
        elif (
            isinstance(node, ast.Call)
            and _dotted(node.func) in ("getattr", "hasattr", "setattr")
            and len(node.args) > 1
            and isinstance(node.args[1], ast.Constant)
        ):
            line, name, is_foreign = node.lineno, str(node.args[1].value), False
        else:
            continue
        is_private = name.startswith("_") and not name.startswith("__")
        if is_private and name not in DOCUMENTED and (is_foreign or name not in own):
            yield line, name


def _held_by_compat(module: Module) -> set[str]:
    """Private attributes that compat files read from objects of other packages."""
    if not module.is_compat:
        return set()
    return {
        node.attr
        for node in module.nodes
        if isinstance(node, ast.Attribute)
        and _root(node) not in OWN
        and (_root(node) not in module.imported or module.is_foreign(node))
    }


def measures(source: Source) -> dict[str, int]:
    """All measures of a package, by name."""
    by_kind = lines(source)
    folders = files_per_folder(source)
    groups = cycles(import_graph(source))
    return {
        "members of engine interfaces": sum(interface_members(source).values()),
        "attributes replaced for the process": sum(
            replaced_attributes(source).values()
        ),
        "attributes replaced for a time": temporary_attributes(source),
        "StatelessScope subclasses": len(source.subclasses("StatelessScope")),
        "communicators": len(communicators(source)),
        "modules that start processes": len(launchers(source)),
        "duplicate public class names": len(duplicate_classes(source)),
        "lines of code": by_kind["code"],
        "lines of code with imports and raises": by_kind["code"]
        + by_kind["imports"]
        + by_kind["raises"],
        "lines": by_kind.total(),
        "files": folders.total(),
        "folders of more than 12 files": sum(n > 12 for n in folders.values()),
        "files of the largest folder": max(folders.values()),
        "import cycles": len(groups),
        "modules in import cycles": sum(map(len, groups)),
        "private names outside of compat files": len(private_names(source)),
    }


def _titles(classes: Iterable[tuple[Module, ast.ClassDef]]) -> list[str]:
    return [f"{module.name}.{node.name}" for module, node in classes]


def main(arguments: list[str]) -> None:
    source = Source((Path(arguments[0]) if arguments else REPOSITORY) / PACKAGE)
    for name, value in measures(source).items():
        print(f"{name:42}{value:>8,}")
    details: dict[str, Iterable[object]] = {
        "Interfaces": interface_members(source).items(),
        "Replaced": replaced_attributes(source).items(),
        "Scopes": (
            f"{m.name}.{n.name}" for m, n in source.subclasses("StatelessScope")
        ),
        "Communicators": communicators(source),
        "Launchers": launchers(source),
        "Duplicates": duplicate_classes(source),
        "Folders": [(f, n) for f, n in files_per_folder(source).items() if n > 12],
        "Cycles": cycles(import_graph(source)),
        "Private names": private_names(source),
    }
    for title, found in details.items():
        print(f"\n{title}")
        for each in found:
            print(f"  {each}")


if __name__ == "__main__":
    main(sys.argv[1:])
