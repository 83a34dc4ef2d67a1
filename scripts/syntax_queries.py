"""Questions about the syntax tree of a Python file, which `scripts.measure_structure` asks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

DATA_BASES = frozenset(
    {"NamedTuple", "TypedDict", "Protocol", "Struct", "Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}
)
BROAD = frozenset({"Exception", "BaseException"})
_NO_ACTIONS = frozenset({"property", "cached_property", "classmethod", "staticmethod"})


def class_definitions(tree: ast.Module) -> list[ast.ClassDef]:
    """All classes of a module, those inside classes and functions too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def function_definitions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a module, those inside functions too."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def module_level_classes(tree: ast.Module) -> Mapping[str, ast.ClassDef]:
    """The classes that a module defines by name, also inside `if` or `try`; not those in classes and functions.

    Two branches that define the same name give one class: the first.
    """
    found: dict[str, ast.ClassDef] = {}
    for node in _module_level(tree):
        if isinstance(node, ast.ClassDef):
            found.setdefault(node.name, node)
    return found


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            yield from _module_level(child)


def is_data_class(node: ast.ClassDef) -> bool:
    """Whether a class only holds data: its decorator or a direct base says so."""
    return is_dataclass(node) or not DATA_BASES.isdisjoint(map(_last_name, node.bases))


def is_dataclass(node: ast.ClassDef) -> bool:
    """Whether a class is decorated as a dataclass."""
    return "dataclass" in _decorators(node)


def has_methods(node: ast.ClassDef) -> bool:
    """Whether a class does more than hold data: dunder, class and static methods and properties do not count."""
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(not _is_dunder(one.name) and _NO_ACTIONS.isdisjoint(_decorators(one)) for one in functions)


def count_fields(node: ast.ClassDef) -> int:
    """The fields of a dataclass that its generated constructor takes, without those that it inherits."""
    return sum(isinstance(one, ast.AnnAssign) and _is_parameter(one) for one in node.body)


def count_parameters(node: ast.ClassDef) -> int:
    """The parameters of the constructor that a class defines, without `self`; 0 if it defines none."""
    methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
    constructor = methods.get("__init__") or methods.get("__new__")
    if constructor is None:
        return 0
    arguments = constructor.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len(named) - 1 + (arguments.vararg is not None) + (arguments.kwarg is not None)


def has_summary(docstring: str) -> bool:
    """Whether a docstring begins with a line of text, not with a heading such as `Args:`."""
    text = docstring.strip()
    return bool(text) and not text.splitlines()[0].rstrip().endswith(":")


def broad_excepts(tree: ast.Module) -> list[ast.ExceptHandler | ast.Call]:
    """The handlers that catch whatever is raised, and the calls of `suppress` that do."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler | ast.Call)]
    return [node for node in nodes if _is_broad(node)]


def _is_broad(node: ast.ExceptHandler | ast.Call) -> bool:
    if isinstance(node, ast.ExceptHandler):
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        return any(one is None or _last_name(one) in BROAD for one in caught)
    return _last_name(node.func) == "suppress" and any(_last_name(one) in BROAD for one in node.args)


def raises_again(node: ast.ExceptHandler | ast.Call) -> bool:
    """Whether a handler always ends with a bare `raise`: it is the last statement, and nothing leaves before it."""
    if isinstance(node, ast.Call):
        return False
    *before, last = node.body
    return isinstance(last, ast.Raise) and last.exc is None and not any(map(_may_leave, before))


def _may_leave(node: ast.AST, in_loop: bool = False) -> bool:
    """Whether a statement can go elsewhere than to the next one, other than by raising."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        return False
    if isinstance(node, ast.Return) or (isinstance(node, ast.Break | ast.Continue) and not in_loop):
        return True
    in_loop = in_loop or isinstance(node, ast.For | ast.AsyncFor | ast.While)
    return any(_may_leave(child, in_loop) for child in ast.iter_child_nodes(node))


def _is_parameter(field: ast.AnnAssign) -> bool:
    """Whether a dataclass's constructor takes a field: it is neither a `ClassVar` nor `field(init=False)`."""
    options = field.value.keywords if isinstance(field.value, ast.Call) else []
    by_itself = any(one.arg == "init" and getattr(one.value, "value", None) is False for one in options)
    return not by_itself and _last_name(field.annotation) not in ("ClassVar", "KW_ONLY")


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _decorators(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {_last_name(one) for one in node.decorator_list}


def _last_name(node: ast.expr | None) -> str:
    """`Struct` for each of `Struct`, `msgspec.Struct`, `Struct[T]` and `Struct(...)`."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return _last_name(inner)
    return ""
