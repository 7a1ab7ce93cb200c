"""Imports between the modules of the package, and their cycles."""

from __future__ import annotations

import ast

from architecture.package_source import Source, dotted


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
            elif isinstance(node, ast.Call) and "import_module" in dotted(node.func):
                names.update(
                    each.value
                    for each in node.args
                    if isinstance(each, ast.Constant) and isinstance(each.value, str)
                )
        targets = {source.own(name) for name in names} - {None, module.name}
        graph[module.name] = {target for target in targets if target}
    return graph


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
