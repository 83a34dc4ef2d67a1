from __future__ import annotations

from pathlib import Path

import pytest

from scripts.import_graph import Import, ImportKind, find_cycles, find_imports, strongly_connected
from scripts.source_tree import read_modules
from tests.scripts.trees import write_tree

RUN_TIME, TYPE_ONLY, IN_FUNCTION = ImportKind.RUN_TIME, ImportKind.TYPE_ONLY, ImportKind.IN_FUNCTION


def imports_of(folder: Path, files: dict[str, str]) -> list[Import]:
    """The imports between the modules of a package with these files."""
    return find_imports(read_modules(write_tree(folder, files)))


@pytest.mark.parametrize(
    ("statement", "targets"),
    [
        ("import pkg.a.b", {"pkg.a.b"}),
        ("import pkg.a.b as c, pkg.d", {"pkg.a.b", "pkg.d"}),
        ("from pkg.a import b", {"pkg.a.b"}),
        ("from pkg.a import f", {"pkg.a"}),
        ("from pkg.a import b, f", {"pkg.a.b", "pkg.a"}),
        ("from pkg.a.b import f", {"pkg.a.b"}),
        ("from pkg.a import *", {"pkg.a"}),
        ("from . import sibling", {"pkg.here.sibling"}),
        ("from .sibling import f", {"pkg.here.sibling"}),
        ("from .. import d", {"pkg.d"}),
        ("from ..a import b", {"pkg.a.b"}),
        ("from pkg.here import module", set()),  # itself
        ("import os\nfrom json import loads\nimport pkgs", set()),
    ],
)
def test_targets(tmp_path: Path, statement: str, targets: set[str]) -> None:
    others = ["__init__.py", "a/__init__.py", "a/b.py", "d.py", "here/__init__.py", "here/sibling.py"]
    found = imports_of(tmp_path, {**dict.fromkeys(others, ""), "here/module.py": statement})
    assert {(one.source, one.target) for one in found} == {("pkg.here.module", target) for target in targets}


def test_relative_imports_of_a_package_start_at_itself(tmp_path: Path) -> None:
    found = imports_of(tmp_path, {"a/__init__.py": "from .b import f\nfrom .. import c\n", "a/b.py": "", "c.py": ""})
    assert [(one.source, one.target, one.place) for one in found] == [
        ("pkg.a", "pkg.a.b", "pkg/a/__init__.py:1"),
        ("pkg.a", "pkg.c", "pkg/a/__init__.py:2"),
    ]


KINDS = """
import pkg.top
if TYPE_CHECKING:
    import pkg.typed
else:
    import pkg.untyped
if typing.TYPE_CHECKING:
    import pkg.typed_too
if not TYPE_CHECKING:
    import pkg.ran
else:
    import pkg.typed_else
if sys.platform == "linux":
    import pkg.on_linux
try:
    import pkg.tried
except ImportError:
    import pkg.instead
class Thing:
    import pkg.in_class
    def method(self):
        import pkg.in_method
        if TYPE_CHECKING:
            import pkg.typed_inside
async def function():
    with suppress(ImportError):
        import pkg.in_coroutine
"""


def test_kinds(tmp_path: Path) -> None:
    names = {
        **dict.fromkeys(["top", "untyped", "ran", "on_linux", "tried", "instead", "in_class"], RUN_TIME),
        **dict.fromkeys(["typed", "typed_too", "typed_else", "typed_inside"], TYPE_ONLY),
        **dict.fromkeys(["in_method", "in_coroutine"], IN_FUNCTION),
    }
    found = imports_of(tmp_path, {"main.py": KINDS, **{f"{name}.py": "" for name in names}})
    assert {one.target.removeprefix("pkg."): one.kind for one in found} == names


def test_cycles_of_each_kind(tmp_path: Path) -> None:
    guarded = "if TYPE_CHECKING:\n    from pkg import {0}\n"
    found = imports_of(
        tmp_path,
        {
            "a.py": "from pkg.b import f\n",
            "b.py": "from pkg import c\n",
            "c.py": "import pkg.a\n",
            "d.py": "from pkg import a, e\n",
            "e.py": guarded.format("d"),
            "f.py": "from pkg import g\n",
            "g.py": "def late():\n    from pkg import f\n",
        },
    )
    members = [[{one.source for one in cycle} for cycle in find_cycles(found, kinds)] for kinds in (
        {RUN_TIME}, {RUN_TIME, TYPE_ONLY}, set(ImportKind),
    )]  # fmt: skip
    abc, de, fg = {"pkg.a", "pkg.b", "pkg.c"}, {"pkg.d", "pkg.e"}, {"pkg.f", "pkg.g"}
    assert members == [[abc], [abc, de], [abc, de, fg]]
    assert [one.place for one in find_cycles(found, {RUN_TIME})[0]] == ["pkg/a.py:1", "pkg/b.py:1", "pkg/c.py:1"]


@pytest.mark.parametrize(
    ("edges", "components"),
    [
        ("", []),
        ("ab bc", ["a", "b", "c"]),
        ("ab ba", ["ab"]),
        ("ab bc ca cd de ed", ["abc", "de"]),
        ("ab bc cb bd da", ["abcd"]),
        ("ab ac bd cd", ["a", "b", "c", "d"]),  # two ways to d are no cycle
        ("ba ca ad da bc", ["ad", "b", "c"]),
    ],
)
def test_strongly_connected_components(edges: str, components: list[str]) -> None:
    graph: dict[str, set[str]] = {}
    for edge in edges.split():
        graph.setdefault(edge[0], set()).add(edge[1])
    assert sorted("".join(one) for one in strongly_connected(graph)) == components
