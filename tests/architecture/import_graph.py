"""Imports between the modules of the package, and their cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from architecture.package_source import PACKAGE, Module, Source


def import_graph(source: Source) -> dict[str, set[str]]:
    """What each module imports: ordinarily, in functions, for types, or by a string."""
    graph = {}
    for module in source.modules:
        targets = {source.own(name) for name in _imported(module)}
        targets |= {_named(source, each) for each in module.nodes}
        graph[module.name] = {each for each in targets if each} - {module.name}
    return graph


def _imported(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _named(source: Source, node: ast.AST) -> str | None:
    """The module that a string names, as `"package.module"` or with `":function"`."""
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return None
    name = node.value.partition(":")[0]
    target = source.own(name) if name.startswith(f"{PACKAGE}.") else None
    return target if target and name.endswith(target) else None


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
