from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.measure_structure import Figure, main, measure
from scripts.source_tree import read_folders, read_modules
from tests.scripts.trees import write_tree

Measure = Callable[[dict[str, str]], dict[str, Figure]]


@pytest.fixture
def measured(tmp_path: Path) -> Measure:
    """Measures a package with the given files; figures by their keys."""

    def run(files: dict[str, str]) -> dict[str, Figure]:
        root = write_tree(tmp_path, files)
        return {figure.key: figure for figure in measure(read_modules(root), read_folders(root))}

    return run


def listed(figure: Figure) -> list[tuple[str, str]]:
    """A figure's offenders as pairs."""
    return [(offender.place, offender.text) for offender in figure.offenders]


def test_files_and_lines(measured: Measure) -> None:
    found = measured({f"f{count:02}.py": "pass\n" * count for count in range(1, 11)} | {"long.py": "pass\n" * 351})
    assert (found["files"].value, found["lines"].value) == (11, 55 + 351)
    assert (found["file_lines_median"].value, found["file_lines_p90"].value, found["file_lines_max"].value) == (
        6,
        10,
        351,
    )
    assert found["long_files"].value == 1
    assert listed(found["file_lines_max"])[:2] == [("pkg/long.py:1", "351 lines"), ("pkg/f10.py:1", "10 lines")]


def test_functions_are_measured_from_def_to_end(measured: Measure) -> None:
    found = measured({"a.py": '''
        @decorated(
            "twice"
        )
        def outer(
            one,
        ):
            """Says what."""
            def inner():
                return 1
            return inner

        class Thing:
            async def method(self): ...
        '''})  # fmt: skip
    assert listed(found["function_lines_max"]) == [
        ("pkg/a.py:4", "outer: 7 lines"),
        ("pkg/a.py:8", "inner: 2 lines"),
        ("pkg/a.py:13", "method: 1 lines"),
    ]
    assert (found["function_lines_median"].value, found["function_lines_p90"].value) == (2, 7)
    assert found["function_lines_max"].value == 7


def test_long_functions_are_counted(measured: Measure) -> None:
    body = "    pass\n" * 59
    found = measured({"a.py": f"def fits():\n{body}\ndef too_long():\n    pass\n{body}"})
    assert (found["long_functions"].value, found["function_lines_max"].value) == (1, 61)


EIGHT = "a, b, /, c, d, *e, f, g, **h"
NINE = f"i, {EIGHT}"


@pytest.mark.parametrize(
    ("source", "offenders"),
    [
        (f"class A:\n    def __init__(self, {EIGHT}): ...", []),
        (f"class A:\n    def __init__(self, {NINE}): ...", [("pkg/a.py:1", "A: 9 parameters")]),
        (f"class A(int):\n    def __new__(cls, {NINE}): ...", [("pkg/a.py:1", "A: 9 parameters")]),
        (f"class A:\n    def __init__(self): ...\n    def __new__(cls, {NINE}): ...", []),
        (f"class A:\n    def method(self, {NINE}): ...", []),
        (f"@dataclass\nclass A:\n    def __init__(self, {NINE}): ...", []),
        (f"@dataclasses.dataclass(frozen=True)\nclass A:\n    def __init__(self, {NINE}): ...", []),
        (f"class A(msgspec.Struct, frozen=True):\n    def __init__(self, {NINE}): ...", []),
        (f"class A(Protocol[T]):\n    def __init__(self, {NINE}): ...", []),
        (f"class A(enum.Enum):\n    def __init__(self, {NINE}): ...", []),
        (f"def f():\n    class A:\n        def __init__(self, {NINE}): ...", [("pkg/a.py:2", "A: 9 parameters")]),
    ],
)
def test_constructors(measured: Measure, source: str, offenders: list[tuple[str, str]]) -> None:
    found = measured({"a.py": source})["large_constructors"]
    assert (found.value, listed(found)) == (len(offenders), offenders)


FIELDS = "".join(f"    f{number}: int = 0\n" for number in range(8))


@pytest.mark.parametrize(
    ("more", "count"),
    [
        ("    f8: int\n    def act(self): ...", 1),
        ("    def act(self): ...", 0),
        ("    f8: ClassVar[int] = 8\n    _: KW_ONLY\n    def act(self): ...", 0),
        ("    f8: int = field(init=False)\n    def act(self): ...", 0),
        ("    f8: int = field(default=0)\n    async def _act(self): ...", 1),
        ("    f8: int", 0),
        ("    f8: int\n    @property\n    def size(self): ...\n    def __len__(self): ...", 0),
        ("    f8: int\n    @classmethod\n    def read(cls): ...\n    @staticmethod\n    def parse(): ...", 0),
    ],
)
def test_dataclasses_that_work_are_shown_apart(measured: Measure, more: str, count: int) -> None:
    found = measured({"a.py": f"@dataclass(slots=True)\nclass A:\n{FIELDS}{more}"})
    assert listed(found["large_dataclasses"]) == [("pkg/a.py:2", "A: 9 fields")] * count
    assert found["large_constructors"].value == 0


def test_class_names_with_more_than_one_meaning(measured: Measure) -> None:
    found = measured({
        "a.py": "class Plan: ...\nclass _File: ...\nclass Once: ...\nclass Outer:\n    class Nested: ...",
        "b.py": "class Plan: ...\nclass _File: ...\nclass Outer2:\n    class Nested: ...",
        "c/d.py": "if new:\n    class Plan: ...\nelse:\n    class Plan: ...\ndef f():\n    class Once: ...",
        "e.py": "try:\n    class Two: ...\nexcept ImportError:\n    class Two: ...",
    })  # fmt: skip
    plan = ("pkg/a.py:1", "Plan: also pkg/b.py:1, pkg/c/d.py:2")
    assert listed(found["ambiguous_class_names"]) == [plan, ("pkg/a.py:2", "_File: also pkg/b.py:2")]
    assert listed(found["ambiguous_class_names_public"]) == [plan]
    assert (found["ambiguous_class_names"].value, found["ambiguous_class_names_public"].value) == (2, 1)


@pytest.mark.parametrize(
    ("docstring", "figure"),
    [
        ('"""What it is."""', None),
        ('"""What it is.\n\n    Attributes:\n        a: one.\n    """', None),
        ('"""\n    What it is.\n    """', None),
        ('"""Attributes:\n        a: one.\n    """', "docstrings_without_summary"),
        ('"""\n\n    Args:\n        a: one.\n    """', "docstrings_without_summary"),
        ('""" """', "docstrings_without_summary"),
        ('""', "docstrings_without_summary"),
        ("...", "classes_without_docstring"),
        ('f"""Is not one."""', "classes_without_docstring"),
    ],
)
def test_docstrings(measured: Measure, docstring: str, figure: str | None) -> None:
    found = measured({"a.py": f"class A:\n    {docstring}\n    a = 1\n"})
    for key in ("docstrings_without_summary", "classes_without_docstring"):
        assert listed(found[key]) == ([("pkg/a.py:1", "A")] if key == figure else [])


@pytest.mark.parametrize(
    ("handler", "hiding", "raising"),
    [
        ("except: pass", 1, 0),
        ("except Exception: pass", 1, 0),
        ("except BaseException as error: fail(error)", 1, 0),
        ("except (OSError, Exception): pass", 1, 0),
        ("except builtins.Exception: pass", 1, 0),
        ("except* Exception: pass", 1, 0),
        ("except OSError: pass", 0, 0),
        ("except (OSError, ValueError): pass", 0, 0),
        ("except BaseException:\n    clean()\n    raise", 0, 1),
        ("except:\n    for x in y:\n        if x: break\n    def f(): return 1\n    raise", 0, 1),
        ("except Exception as error:\n    raise Other from error", 1, 0),
        ("except Exception as error:\n    raise error", 1, 0),
        ("except Exception:\n    if bad:\n        raise", 1, 0),
        ("except Exception:\n    if harmless: return\n    raise", 1, 0),
        ("except Exception:\n    if harmless: continue\n    raise", 1, 0),
        ("finally:\n    with suppress(Exception): pass", 1, 0),
        ("finally:\n    with contextlib.suppress(OSError, BaseException): pass", 1, 0),
        ("finally:\n    with suppress(OSError): pass", 0, 0),
    ],
)
def test_broad_excepts(measured: Measure, handler: str, hiding: int, raising: int) -> None:
    lines = ["def f():", "  while True:", "    try: work()", *(f"    {line}" for line in handler.splitlines())]
    found = measured({"a.py": "\n".join(lines), "other.py": "pass\n" * (1000 - len(lines))})
    assert (found["broad_excepts"].value, found["broad_excepts_raising"].value) == (hiding, raising)
    assert found["broad_excepts_per_1000_lines"].value == hiding


def test_broad_excepts_are_listed_by_file_worst_first(measured: Measure) -> None:
    one = "try: work()\nexcept Exception: pass\n"
    found = measured({"a.py": one, "b.py": one + one})["broad_excepts"]
    assert listed(found) == [("pkg/b.py:2", "2 at 2, 4"), ("pkg/a.py:2", "1 at 2")]


def test_import_cycles(measured: Measure) -> None:
    found = measured({
        "a.py": "import pkg.b\nfrom pkg import c, d\n",
        "b.py": "import pkg.a\n",
        "c.py": "if TYPE_CHECKING:\n    from pkg import a\n",
        "d.py": "def f():\n    from pkg.a import g\n",
    })  # fmt: skip
    assert listed(found["import_cycles"]) == [("pkg/a.py:1", "2 modules: pkg.a, pkg.b")]
    assert listed(found["import_cycles_types"]) == [("pkg/a.py:1", "3 modules: pkg.a, pkg.b, pkg.c")]
    assert listed(found["import_cycles_all"]) == [("pkg/a.py:1", "4 modules: pkg.a, pkg.b, pkg.c, pkg.d")]


def test_folders(measured: Measure) -> None:
    names = [*(f"full/{number}.js" for number in range(15)), *(f"crowded/{number}.py" for number in range(17))]
    found = measured(dict.fromkeys([*names, "crowded/__init__.py"], ""))
    assert (found["folder_entries_max"].value, found["crowded_folders"].value) == (17, 1)
    assert listed(found["crowded_folders"]) == [("pkg/crowded/", "17 entries")]


def test_a_package_without_files_has_figures_too(measured: Measure) -> None:
    assert {figure.value for figure in measured({}).values()} == {0}


def test_the_table_is_aligned_and_lists_the_worst(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_tree(tmp_path, {f"{name}.py": "pass\n" * lines for name, lines in [("a", 400), ("b", 1000), ("c", 5)]})
    main([str(root), "--worst", "2"])
    header, *rows = capsys.readouterr().out.splitlines()
    figures = [row for row in rows if not row.startswith(" ")]
    end = header.index("value") + len("value")
    assert {row[end - 1].isdigit() and row[end : end + 2].strip() == "" for row in figures} == {True}
    start = next(number for number, row in enumerate(rows) if row.startswith("File length, maximum"))
    assert rows[start].split()[-3:] == ["1,000", "<=", "350"]
    assert rows[start + 1 : start + 3] == ["    pkg/b.py:1  1000 lines", "    pkg/a.py:1  400 lines"]
    assert rows[start + 3].startswith("Files longer than 350 lines")


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--json", "--worst", "1", str(write_tree(tmp_path, {"a.py": "pass\n", "b.py": "pass\npass\n"}))])
    text = capsys.readouterr().out
    found = {figure["key"]: figure for figure in json.loads(text)}
    assert found["lines"]["value"] == 3
    assert found["file_lines_max"]["offenders"] == [{"place": "pkg/b.py:1", "text": "2 lines"}]
    assert str(tmp_path) not in text


def test_a_folder_that_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "nowhere")])
    assert "nowhere is not a folder" in capsys.readouterr().err
