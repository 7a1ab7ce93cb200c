"""Private names of the frameworks outside of the files that are for them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from architecture.package_source import OWN, Module, Source, dotted, root_name

FRAMEWORKS = ("keras", "jax", "torch", "tensorflow")
#: Underscored names that are documented.
DOCUMENTED = {"_fields", "_asdict", "_replace", "_make", "_exit"}


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
            if dotted(node.value) in OWN and name in module.defined:
                continue
            is_foreign = module.is_foreign(node)
            if ast.unparse(node.value).endswith("aten"):
                continue  # The names of Torch's operations are public.
        elif (
            isinstance(node, ast.Call)
            and dotted(node.func) in ("getattr", "hasattr", "setattr")
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
        and root_name(node) not in OWN
        and (root_name(node) not in module.imported or module.is_foreign(node))
    }
