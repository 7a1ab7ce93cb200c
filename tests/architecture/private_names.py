"""Private names of the frameworks outside of the files that are for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from architecture.package_source import (
    OWN,
    Module,
    Source,
    accessed,
    members_of,
    root_name,
)

FRAMEWORKS = ("keras", "jax", "torch", "tensorflow")
#: Underscored names that are documented.
DOCUMENTED = {"_fields", "_asdict", "_replace", "_make", "_exit", "_current_frames"}


def private_names(source: Source) -> list[str]:
    """Private names of the frameworks outside of the files that are for them."""
    held = set().union(*map(_held_by_compat, source.modules))
    return sorted(
        f"{module.name}:{line} {name}"
        for module in source.modules
        if not module.is_compat
        for line, name in {
            *_private_imports(module),
            *_private_uses(source, module, held),
        }
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


def _private_uses(
    source: Source, module: Module, held: set[str]
) -> Iterator[tuple[int, str]]:
    """Underscored attributes of objects that are not the package's own.

    An attribute of `self` is own if the class or a base in the package defines it; one
    of another object, if a class in the module or imported into it does.

    Args:
        held: private attributes of other packages' objects, which are never own on an
            object other than `self`.
    """
    own_of_self = {
        name
        for node in module.classes
        for each in source.with_bases(node)
        for name in members_of(each)
    }
    classes = [*module.classes, *source.imported_classes(module)]
    own_of_others = set().union(*map(members_of, classes)) - held
    for node in module.nodes:
        found = accessed(node)
        if found is None:
            continue
        value, name = found
        if not name.startswith("_") or name.startswith("__") or name in DOCUMENTED:
            continue
        if value is not None and ast.unparse(value) in (*OWN, "super()"):
            is_own = name in own_of_self
        else:
            is_own = name in own_of_others and not module.is_foreign(value)
        if not is_own and not _is_torch_operation(value):
            yield node.lineno, name


def _is_torch_operation(value: ast.expr | None) -> bool:
    """Whether an attribute is one of `torch.ops.aten`, all of which are public."""
    return value is not None and ast.unparse(value).endswith("aten")


def _held_by_compat(module: Module) -> set[str]:
    """Private attributes that compat files read from objects of other packages."""
    if not module.is_compat:
        return set()
    return {
        name
        for value, name in filter(None, map(accessed, module.nodes))
        if root_name(value) not in OWN
        and (root_name(value) not in module.imported or module.is_foreign(value))
    }
