"""Measures of the package's structure, counted from its source.

PYTHONPATH=tests python tests/architecture/measures.py [root of a checkout]
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

from architecture.import_graph import cycles, import_graph
from architecture.package_source import (
    PACKAGE,
    REPOSITORY,
    Module,
    Source,
    bases_of,
    dotted,
    root_name,
)
from architecture.private_names import private_names


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


def required_members(source: Source) -> int:
    """Abstract members of the interfaces that each engine implements."""
    required = {"Engine", "FitDriver", "RunDriver", "ReplicaCollectives"}
    return sum(
        _is_abstract(function)
        for module, node in source.classes()
        if module.engine is None and node.name in required
        for function in _functions(node)
    )


def _ancestors(
    node: ast.ClassDef, shared: dict[str, tuple[Module, ast.ClassDef]]
) -> set[str]:
    direct = bases_of(node) & set(shared)
    return direct.union(*(_ancestors(shared[name][1], shared) for name in direct))


def _is_interface(
    node: ast.ClassDef, shared: dict[str, tuple[Module, ast.ClassDef]]
) -> bool:
    every = [node, *(shared[name][1] for name in _ancestors(node, shared))]
    return any(bases_of(each) & {"ABC", "Protocol"} for each in every)


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def _is_abstract(function: ast.FunctionDef) -> bool:
    return any("abstractmethod" in ast.unparse(d) for d in function.decorator_list)


def overriding_classes(source: Source) -> dict[str, list[str]]:
    """Classes that override a concrete method of a base class of the package.

    Not those of `keras_compat`, whose bases are Keras's. Constructors and texts are not
    counted, nor are defaults: nothing, a constant, an argument or an error.
    """
    classes = {n.name: (m, n) for m, n in source.classes()}
    found = {}
    for module, node in source.classes():
        concrete = {
            function.name
            for name in _ancestors(node, classes)
            for function in _functions(classes[name][1])
            if not _is_abstract(function) and not _is_default(function)
        }
        own = {each.name for each in _functions(node)} & concrete - {
            "__init__",
            "__repr__",
        }
        if own and not module.name.startswith("keras_compat"):
            found[f"{module.name}.{node.name}"] = sorted(own)
    return found


def _is_default(function: ast.FunctionDef) -> bool:
    """Whether a method does nothing, raises, or returns what it takes or a constant."""
    body = [
        each
        for each in function.body
        if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        and not isinstance(each, (ast.Pass, ast.Delete))
    ]
    if not body or isinstance(body[0], ast.Raise):
        return True
    if len(body) > 1 or not isinstance(body[0], ast.Return):
        return False
    value = body[0].value
    names = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
    return (
        value is None
        or isinstance(value, ast.Constant)
        or (isinstance(value, ast.Name) and value.id in names - {"self"})
        or isinstance(value, ast.Dict)
        or (
            isinstance(value, (ast.Tuple, ast.List))
            and all(
                isinstance(each, ast.Constant)
                or (isinstance(each, ast.Name) and each.id in names)
                for each in value.elts
            )
        )
        or ast.unparse(value) == "contextlib.nullcontext()"
    )


def replaced_attributes(source: Source) -> dict[str, int]:
    """Attributes of other packages that are replaced for the whole process."""
    found = {}
    for module in source.modules:
        if module.name.startswith("keras_compat"):
            count = sum(_groups(module, is_temporary=False))
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
        sum(isinstance(n, ast.Call) and dotted(n.func) == "Patch" for n in nodes)
        for node in module.nodes
        if isinstance(node, ast.Call) and dotted(node.func) == "Group"
        for nodes in [list(ast.walk(node))]
        if is_temporary == any(each.arg == "is_temporary" for each in node.keywords)
    ]


def listed_private_names(source: Source) -> int:
    """Private names in the tables of the files that use them."""
    return sum(
        len(names.elts)
        for module in source.modules
        for node in module.nodes
        if isinstance(node, ast.Call) and dotted(node.func) == "Private"
        for names in node.args[1:2]
        if isinstance(names, ast.Tuple)
    )


def _foreign_assignments(module: Module) -> Iterator[str]:
    """Assignments to attributes of what is imported from another package."""
    for node in module.nodes:
        if not isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            continue
        targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        for target in targets:
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                root = root_name(target)
                name = module.imported.get(root or "", "")
                if name and not name.startswith(PACKAGE) and name != "os":
                    yield ast.unparse(target)


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
                dotted(node.func) in starts
                or (
                    isinstance(node.func, ast.Attribute)
                    and node.func.attr == "Process"
                    # The handle of a process that runs.
                    and dotted(node.func) != "psutil.Process"
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
    return sum(map(lines_of, source.modules), Counter())


def lines_of(module: Module) -> Counter[str]:
    """The lines of one module by kind, as `lines`."""
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
    return Counter(kinds.values())


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


def measures(source: Source) -> dict[str, int]:
    """All measures of a package, by name."""
    by_kind = lines(source)
    folders = files_per_folder(source)
    groups = cycles(import_graph(source))
    return {
        "members of engine interfaces": sum(interface_members(source).values()),
        "required members of an engine": required_members(source),
        "attributes replaced for the process": sum(
            replaced_attributes(source).values()
        ),
        "attributes replaced for a time": temporary_attributes(source),
        "StatelessScope subclasses": len(source.subclasses("StatelessScope")),
        "communicators": len(communicators(source)),
        "classes that override a concrete method": len(overriding_classes(source)),
        "modules that start processes": len(launchers(source)),
        "duplicate public class names": len(duplicate_classes(source)),
        "lines of code": by_kind["code"],
        "lines of code with imports and raises": by_kind["code"]
        + by_kind["imports"]
        + by_kind["raises"],
        "lines": by_kind.total(),
        "files": folders.total(),
        "files of more than 500 lines of code": sum(
            lines_of(module)["code"] > 500 for module in source.modules
        ),
        "folders of more than 12 files": sum(n > 12 for n in folders.values()),
        "files of the largest folder": max(folders.values()),
        "import cycles": len(groups),
        "modules in import cycles": sum(map(len, groups)),
        "private names outside of compat files": len(private_names(source)),
        "private names of Keras and frameworks": listed_private_names(source),
    }


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
        "Overriding": overriding_classes(source).items(),
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
