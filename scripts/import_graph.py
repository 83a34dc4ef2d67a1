"""Finds the imports between the modules of a package, and the cycles among them.

Only `import` statements are seen, not `importlib.import_module`. An import of `a.b` leads to `a.b` alone, although
Python runs `a/__init__.py` first: otherwise a package whose `__init__.py` imports its modules would often be a cycle.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scripts.source_tree import Module

TYPE_CHECKING = "TYPE_CHECKING"


class ImportKind(enum.Enum):
    """When an import statement runs."""

    RUN_TIME = "when the module is imported"
    TYPE_ONLY = "never: under TYPE_CHECKING"
    IN_FUNCTION = "when a function is called"


@dataclass(frozen=True)
class Import:
    """An import of one module of the package by another.

    Attributes:
        source: the module that holds the statement.
        target: the module that it names.
        kind: when it runs.
        place: the statement's `path:line`.
    """

    source: str
    target: str
    kind: ImportKind
    place: str


def find_imports(modules: Sequence[Module]) -> list[Import]:
    """All imports from one of the modules to another."""
    names = {module.name for module in modules}
    return [
        Import(module.name, target, kind, module.place(statement))
        for module in modules
        for statement, kind in _statements(module.tree, ImportKind.RUN_TIME)
        for target in _targets(statement, module, names)
        if target != module.name
    ]


def find_cycles(imports: Iterable[Import], kinds: Collection[ImportKind]) -> list[list[Import]]:
    """The cycles that imports of the given kinds make, each as the imports inside it; the largest come first.

    A cycle is a strongly connected component of at least two modules: each reaches every other.
    """
    followed = [one for one in imports if one.kind in kinds]
    graph: dict[str, set[str]] = {}
    for one in followed:
        graph.setdefault(one.source, set()).add(one.target)
    cycles = [component for component in strongly_connected(graph) if len(component) > 1]
    cycles.sort(key=lambda component: (-len(component), component))
    return [[one for one in followed if {one.source, one.target} <= set(component)] for component in cycles]


def strongly_connected(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """The strongly connected components of a directed graph, each sorted: Tarjan's algorithm.

    It recurses once a node of the longest path, which is far from Python's limit for the modules of one package.
    """
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = lowest[node] = len(order)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in order:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], order[target])
        if lowest[node] == order[node]:
            start = stack.index(node)
            components.append(sorted(stack[start:]))
            del stack[start:]

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return components


def _statements(node: ast.AST, kind: ImportKind) -> Iterator[tuple[ast.Import | ast.ImportFrom, ImportKind]]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, kind
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and kind is ImportKind.RUN_TIME:
        kind = ImportKind.IN_FUNCTION
    type_only = _type_only_branch(node)
    for child in ast.iter_child_nodes(node):
        yield from _statements(child, ImportKind.TYPE_ONLY if child in type_only else kind)


def _type_only_branch(node: ast.AST) -> list[ast.stmt]:
    if not isinstance(node, ast.If):
        return []
    match node.test:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name == TYPE_CHECKING:
            return node.body
        case ast.UnaryOp(op=ast.Not(), operand=ast.Name(id=name) | ast.Attribute(attr=name)) if name == TYPE_CHECKING:
            return node.orelse
    return []


def _targets(statement: ast.Import | ast.ImportFrom, module: Module, names: Collection[str]) -> Iterator[str]:
    """The modules that a statement names: `from package import module` names the module, not the package."""
    if isinstance(statement, ast.Import):
        yield from (alias.name for alias in statement.names if alias.name in names)
        return
    base = _base_of(statement, module)
    for alias in statement.names:
        target = f"{base}.{alias.name}"
        if target in names:
            yield target
        elif base in names:
            yield base


def _base_of(statement: ast.ImportFrom, module: Module) -> str:
    """The absolute name of what stands between `from` and `import`."""
    if not statement.level:
        return statement.module or ""
    parents = module.name.split(".")
    ascents = statement.level - module.is_package
    kept = parents[: len(parents) - ascents]
    return ".".join([*kept, statement.module] if statement.module else kept)
