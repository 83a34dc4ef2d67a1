"""Measures how easy a package is to find one's way in, and lists the worst offenders below each figure.

    python -m scripts.measure_structure [--json] [--worst N] [ROOT]

The files below ROOT (`swarm` unless another folder is given) are parsed, never imported. Places are given as
`path:line`, relative to the folder that holds ROOT. The figures follow these rules:

- A function is as long as the lines from its `def` to its end, docstring included and decorators not. A function inside
  another counts on its own as well. Percentiles are values that occur (nearest rank).
- A working class is any but a dataclass, `NamedTuple`, `TypedDict`, `Protocol`, `msgspec.Struct` or `Enum`. The
  parameters of its `__init__`, or else its `__new__`, are counted without `self`; `*args` and `**kwargs` are one each.
  Dataclasses with methods and many fields are shown apart, since some of them are working classes too.
- A class name has more than one meaning if more than one module defines it, outside of classes and functions. Nested
  classes do not count: their owner says which one is meant. Neither do two branches of one module.
- A class docstring has no summary if it is empty or its first line ends with a colon, as `Args:` does.
- A broad except is a bare `except`, or one of `Exception` or `BaseException`, also in a tuple; `suppress(Exception)` is
  one too. Handlers that clean up and always end with a bare `raise` hide nothing and are counted apart.
- Import cycles are strongly connected components; see `scripts.import_graph` for what counts as an import.
- A folder's entries are its files and folders at one level, without `__init__.py`, `__pycache__`, `py.typed` and hidden
  files.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scripts.import_graph import ImportKind, find_cycles, find_imports
from scripts.source_tree import Module, read_folders, read_modules
from scripts.syntax_queries import (
    broad_excepts,
    class_definitions,
    count_fields,
    count_parameters,
    function_definitions,
    has_methods,
    has_summary,
    is_data_class,
    is_dataclass,
    module_level_classes,
    raises_again,
)

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_PARAMETERS = 8
MAX_FOLDER_ENTRIES = 15
MAX_BROAD_EXCEPTS_PER_1000_LINES = 0.5


@dataclass(frozen=True)
class Offender:
    """One place that a figure counts, and what is the matter there."""

    place: str
    text: str


@dataclass(frozen=True)
class Figure:
    """One line of the table.

    Attributes:
        key: its name in JSON.
        title: its name for people.
        value: what was measured.
        target: what is wanted, such as `<= 350`; empty for figures that only inform.
        offenders: what makes it as large as it is, worst first.
    """

    key: str
    title: str
    value: float
    target: str = ""
    offenders: tuple[Offender, ...] = ()


def measure(modules: Sequence[Module], folders: Mapping[str, Collection[str]]) -> list[Figure]:
    """All figures, in the order in which they are printed."""
    return [
        Figure("files", "Python files", len(modules)),
        Figure("lines", "Lines", count_lines(modules)),
        *measure_file_lengths(modules),
        *measure_function_lengths(modules),
        count_large_constructors(modules),
        count_large_dataclasses(modules),
        count_ambiguous_class_names(modules),
        count_ambiguous_class_names(modules, public_only=True),
        count_docstrings_without_summary(modules),
        count_classes_without_docstring(modules),
        *measure_broad_excepts(modules),
        *count_import_cycles(modules),
        *measure_folders(folders),
    ]


def count_lines(modules: Sequence[Module]) -> int:
    """Lines of all files together."""
    return sum(module.lines for module in modules)


def measure_file_lengths(modules: Sequence[Module]) -> list[Figure]:
    """Median, 90th percentile and maximum lines of a file, and how many files are too long."""
    lengths = [(module.lines, Offender(f"{module.path}:1", f"{module.lines} lines")) for module in modules]
    return _describe_lengths("file", lengths, MAX_FILE_LINES)


def measure_function_lengths(modules: Sequence[Module]) -> list[Figure]:
    """Median, 90th percentile and maximum lines of a function, and how many functions are too long."""
    lengths = []
    for module in modules:
        for node in function_definitions(module.tree):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            lengths.append((length, Offender(module.place(node), f"{node.name}: {length} lines")))
    return _describe_lengths("function", lengths, MAX_FUNCTION_LINES)


def count_large_constructors(modules: Sequence[Module]) -> Figure:
    """Working classes whose constructor has too many parameters."""
    found = []
    for module in modules:
        for node in class_definitions(module.tree):
            if not is_data_class(node) and (count := count_parameters(node)) > MAX_CONSTRUCTOR_PARAMETERS:
                found.append((count, Offender(module.place(node), f"{node.name}: {count} parameters")))
    title = f"Constructors with more than {MAX_CONSTRUCTOR_PARAMETERS} parameters"
    return Figure("large_constructors", title, len(found), "0", _worst_first(found))


def count_large_dataclasses(modules: Sequence[Module]) -> Figure:
    """Dataclasses with too many fields that are more than data, since they have methods."""
    found = []
    for module in modules:
        for node in class_definitions(module.tree):
            if is_dataclass(node) and has_methods(node) and (count := count_fields(node)) > MAX_CONSTRUCTOR_PARAMETERS:
                found.append((count, Offender(module.place(node), f"{node.name}: {count} fields")))
    title = f"Dataclasses with methods, more than {MAX_CONSTRUCTOR_PARAMETERS} fields"
    return Figure("large_dataclasses", title, len(found), "", _worst_first(found))


def count_ambiguous_class_names(modules: Sequence[Module], public_only: bool = False) -> Figure:
    """Class names that more than one module defines; `public_only` leaves out those that begin with an underscore."""
    places: dict[str, list[str]] = {}
    for module in modules:
        for name, node in module_level_classes(module.tree).items():
            if not (public_only and name.startswith("_")):
                places.setdefault(name, []).append(module.place(node))
    found = [
        (len(where), Offender(where[0], f"{name}: also {', '.join(where[1:])}"))
        for name, where in places.items()
        if len(where) > 1
    ]
    key, title = "ambiguous_class_names", "Class names with more than one meaning"
    if public_only:
        return Figure(f"{key}_public", f"{title}, public ones", len(found), "0", _worst_first(found))
    return Figure(key, title, len(found), "0", _worst_first(found))


def count_docstrings_without_summary(modules: Sequence[Module]) -> Figure:
    """Class docstrings that do not begin with a line that says what the class is."""
    found = []
    for module in modules:
        for node in class_definitions(module.tree):
            docstring = ast.get_docstring(node)
            if docstring is not None and not has_summary(docstring):
                found.append(Offender(module.place(node), node.name))
    return Figure(
        "docstrings_without_summary", "Class docstrings without a summary line", len(found), "0", tuple(found)
    )


def count_classes_without_docstring(modules: Sequence[Module]) -> Figure:
    """Classes that have no docstring at all, nested and private ones too."""
    found = [
        Offender(module.place(node), node.name)
        for module in modules
        for node in class_definitions(module.tree)
        if ast.get_docstring(node) is None
    ]
    return Figure("classes_without_docstring", "Classes without a docstring", len(found), "", tuple(found))


def measure_broad_excepts(modules: Sequence[Module]) -> list[Figure]:
    """Broad excepts for each thousand lines, their number, and those that only clean up and raise again."""
    hiding: dict[str, list[int]] = {}
    raising: dict[str, list[int]] = {}
    for module in modules:
        for node in broad_excepts(module.tree):
            (raising if raises_again(node) else hiding).setdefault(module.path, []).append(node.lineno)
    count = sum(map(len, hiding.values()))
    rate = 1000 * count / max(count_lines(modules), 1)
    title = "Broad excepts"
    target = f"< {MAX_BROAD_EXCEPTS_PER_1000_LINES}"
    return [
        Figure("broad_excepts_per_1000_lines", f"{title} per thousand lines", round(rate, 2), target),
        Figure("broad_excepts", title, count, "", _by_file(hiding)),
        Figure(
            "broad_excepts_raising", f"{title} that raise again", sum(map(len, raising.values())), "", _by_file(raising)
        ),
    ]


def count_import_cycles(modules: Sequence[Module]) -> list[Figure]:
    """Import cycles at run time, then with the imports for types as well, then with those inside functions as well."""
    imports = find_imports(modules)
    run_time, type_only = ImportKind.RUN_TIME, ImportKind.TYPE_ONLY
    figures = []
    for key, title, kinds, target in (
        ("import_cycles", "Import cycles at run time", (run_time,), "0"),
        ("import_cycles_types", "Import cycles, imports for types too", (run_time, type_only), "0"),
        ("import_cycles_all", "Import cycles, imports in functions too", tuple(ImportKind), ""),
    ):
        found = []
        for cycle in find_cycles(imports, kinds):
            members = sorted({one.source for one in cycle})
            found.append(Offender(cycle[0].place, f"{len(members)} modules: {', '.join(members)}"))
        figures.append(Figure(key, title, len(found), target, tuple(found)))
    return figures


def measure_folders(folders: Mapping[str, Collection[str]]) -> list[Figure]:
    """The most entries that a folder shows at one level, and how many folders show too many."""
    sizes = [(len(entries), Offender(f"{folder}/", f"{len(entries)} entries")) for folder, entries in folders.items()]
    crowded = [(size, offender) for size, offender in sizes if size > MAX_FOLDER_ENTRIES]
    largest = max((size for size, _ in sizes), default=0)
    title = f"Folders with more than {MAX_FOLDER_ENTRIES} entries"
    return [
        Figure("folder_entries_max", "Folder entries, maximum", largest, f"<= {MAX_FOLDER_ENTRIES}"),
        Figure("crowded_folders", title, len(crowded), "0", _worst_first(crowded)),
    ]


def _describe_lengths(what: str, lengths: Sequence[tuple[int, Offender]], limit: int) -> list[Figure]:
    values = sorted(length for length, _ in lengths) or [0]
    rank = math.ceil(0.9 * len(values)) - 1
    title = f"{what.capitalize()} length"
    return [
        Figure(f"{what}_lines_median", f"{title}, median", statistics.median(values)),
        Figure(f"{what}_lines_p90", f"{title}, 90th percentile", values[rank]),
        Figure(f"{what}_lines_max", f"{title}, maximum", values[-1], f"<= {limit}", _worst_first(lengths)),
        Figure(f"long_{what}s", f"{what.capitalize()}s longer than {limit} lines", sum(v > limit for v in values), "0"),
    ]


def _worst_first(found: Sequence[tuple[int, Offender]]) -> tuple[Offender, ...]:
    return tuple(offender for _, offender in sorted(found, key=lambda one: -one[0]))


def _by_file(lines: Mapping[str, list[int]]) -> tuple[Offender, ...]:
    found = [
        (len(where), Offender(f"{path}:{min(where)}", f"{len(where)} at {', '.join(map(str, sorted(where)))}"))
        for path, where in lines.items()
    ]
    return _worst_first(found)


def render_table(figures: Sequence[Figure]) -> str:
    """The figures in aligned columns, with each one's offenders below it."""
    return "\n".join(_rows(figures))


def _rows(figures: Sequence[Figure]) -> Iterator[str]:
    values = [f"{figure.value:,}".removesuffix(".0") for figure in figures]
    title_width = max(len(figure.title) for figure in figures)
    value_width = max(len("value"), *map(len, values))
    yield f"{'figure':{title_width}}  {'value':>{value_width}}  target"
    for figure, value in zip(figures, values, strict=True):
        yield f"{figure.title:{title_width}}  {value:>{value_width}}  {figure.target}".rstrip()
        yield from (f"    {offender.place}  {offender.text}" for offender in figure.offenders)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the figures of one package."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.measure_structure", description="Measure a package's structure."
    )
    parser.add_argument(
        "root", nargs="?", type=Path, default=Path("swarm"), metavar="ROOT", help="the package's folder (swarm)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--worst", type=int, default=5, metavar="N", help="offenders listed below each figure (5)")
    options = parser.parse_args(arguments)
    if not options.root.is_dir():
        parser.error(f"{options.root} is not a folder: give the folder of a Python package")
    figures = measure(read_modules(options.root), read_folders(options.root))
    shown = [replace(figure, offenders=figure.offenders[: max(options.worst, 0)]) for figure in figures]
    print(json.dumps([asdict(figure) for figure in shown], indent=2) if options.json else render_table(shown))


if __name__ == "__main__":
    main()
