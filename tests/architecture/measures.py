"""Measures of the package's structure, counted from its source.

PYTHONPATH=tests python tests/architecture/measures.py [root of a checkout]
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

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

_Classes = dict[str, tuple[Module, ast.ClassDef]]


def interface_members(source: Source) -> set[str]:
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
    return {
        f"{shared[name][0].name}.{name}.{function.name}"
        for name, names in overridden.items()
        if _is_interface(shared[name][1], shared)
        for function in _functions(shared[name][1])
        if not function.name.startswith("_")
        and (function.name in names or _is_abstract(function))
    }


def required_members(source: Source) -> list[str]:
    """Abstract members of the interfaces that each engine implements."""
    required = {"Engine", "FitDriver", "RunDriver", "ReplicaCollectives"}
    return [
        f"{node.name}.{function.name}"
        for module, node in source.classes()
        if module.engine is None and node.name in required
        for function in _functions(node)
        if _is_abstract(function)
    ]


def _ancestors(node: ast.ClassDef, shared: _Classes) -> set[str]:
    direct = bases_of(node) & set(shared)
    return direct.union(*(_ancestors(shared[name][1], shared) for name in direct))


def _is_interface(node: ast.ClassDef, shared: _Classes) -> bool:
    every = [node, *(shared[name][1] for name in _ancestors(node, shared))]
    return any(bases_of(each) & {"ABC", "Protocol"} for each in every)


def _functions(node: ast.ClassDef) -> list[ast.FunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef)]


def _is_abstract(function: ast.FunctionDef) -> bool:
    return any("abstractmethod" in ast.unparse(d) for d in function.decorator_list)


def overriding_classes(source: Source) -> list[str]:
    """Classes that override a concrete method of a base class of the package.

    Not those of `keras_compat`, whose bases are Keras's. Constructors and texts are not
    counted, nor are defaults: nothing, a constant, an argument or an error.
    """
    classes = {n.name: (m, n) for m, n in source.classes()}
    found = []
    for module, node in source.classes():
        concrete = {
            function.name
            for name in _ancestors(node, classes)
            for function in _functions(classes[name][1])
            if not _is_abstract(function) and not _is_default(function)
        } - {"__init__", "__repr__"}
        own = {each.name for each in _functions(node)} & concrete
        if own and not module.name.startswith("keras_compat"):
            found.append(f"{module.name}.{node.name}: {sorted(own)}")
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

    def is_given(each: ast.expr | None) -> bool:
        is_argument = isinstance(each, ast.Name) and each.id in names
        return each is None or isinstance(each, ast.Constant) or is_argument

    if isinstance(value, (ast.Tuple, ast.List)):
        return all(map(is_given, value.elts))
    return (
        (is_given(value) and ast.unparse(body[0]) != "return self")
        or isinstance(value, ast.Dict)
        or ast.unparse(body[0]) == "return contextlib.nullcontext()"
    )


def replaced_attributes(source: Source) -> list[str]:
    """Attributes of other packages that are replaced for the whole process."""
    return [
        f"{module.name} {name}"
        for module in source.modules
        for name in (
            _patches(module, is_temporary=False)
            if module.name.startswith("keras_compat")
            else _foreign_assignments(module)
        )
    ]


def temporary_attributes(source: Source) -> list[str]:
    """Attributes of Keras that are replaced while a block of code runs."""
    return [
        f"{module.name} {name}"
        for module in source.modules
        if module.name.startswith("keras_compat")
        for name in _patches(module, is_temporary=True)
    ]


def _patches(module: Module, *, is_temporary: bool) -> Iterator[str]:
    """The rows of a manifest's groups of patches."""
    for node in module.nodes:
        if not isinstance(node, ast.Call) or dotted(node.func) != "Group":
            continue
        if is_temporary == any(each.arg == "is_temporary" for each in node.keywords):
            for each in ast.walk(node):
                if isinstance(each, ast.Call) and dotted(each.func) == "Patch":
                    yield ast.unparse(each.args[0])


def listed_private_names(source: Source) -> list[str]:
    """Private names in the tables of the files that use them."""
    return [
        ast.unparse(name)
        for module in source.modules
        for node in module.nodes
        if isinstance(node, ast.Call) and dotted(node.func) == "Private"
        for names in node.args[1:2]
        if isinstance(names, ast.Tuple)
        for name in names.elts
    ]


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
    modules = [*source.modules, *(Source(harness).modules if harness.is_dir() else ())]
    return [m.name for m in modules if any(map(_starts_process, m.nodes))]


def _starts_process(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = dotted(node.func)
    is_of_module = isinstance(node.func, ast.Attribute) and node.func.attr == "Process"
    # `psutil.Process` is the handle of a process that runs.
    return name in ("subprocess.Popen", "os.fork", "os.posix_spawn") or (
        is_of_module and name != "psutil.Process"
    )


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
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            _mark(kinds, node.body[0], "docstrings")
    return Counter(kinds.values())


_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _mark(kinds: dict[int, str], node: ast.stmt, kind: str) -> None:
    for i in range(node.lineno, (node.end_lineno or node.lineno) + 1):
        kinds[i] = kind


def measures(source: Source) -> dict[str, Collection[object]]:
    """What is counted of a package, by the name of its measure."""
    return {
        "members of engine interfaces": interface_members(source),
        "required members of an engine": required_members(source),
        "attributes replaced for the process": replaced_attributes(source),
        "attributes replaced for a time": temporary_attributes(source),
        "StatelessScope subclasses": [
            f"{m.name}.{n.name}" for m, n in source.subclasses("StatelessScope")
        ],
        "communicators": communicators(source),
        "classes that override a concrete method": overriding_classes(source),
        "modules that start processes": launchers(source),
        "duplicate public class names": duplicate_classes(source),
        "files of more than 500 lines of code": [
            m.name for m in source.modules if lines_of(m)["code"] > 500
        ],
        "private names outside of compat files": private_names(source),
        "private names of Keras and frameworks": listed_private_names(source),
    }


def main(arguments: list[str]) -> None:
    source = Source((Path(arguments[0]) if arguments else REPOSITORY) / PACKAGE)
    print(f"{len(source.modules)} files, lines by kind: {dict(lines(source))}\n")
    found = measures(source)
    for name, counted in found.items():
        print(f"{name:42}{len(counted):>8,}")
    for name, counted in found.items():
        print(f"\n{name}", *counted, sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
