from __future__ import annotations

from pathlib import Path

import pytest

from scripts.source_tree import parse_module, read_folders, read_modules
from tests.scripts.trees import write_tree


def test_names_and_paths_are_those_of_the_package(tmp_path: Path) -> None:
    root = write_tree(
        tmp_path, {"__init__.py": "", "a/__init__.py": "", "a/b.py": "x = 1\n", "page.js": "", ".venv/c.py": ""}
    )
    modules = read_modules(root)
    assert [(one.name, one.path, one.is_package) for one in modules] == [
        ("pkg", "pkg/__init__.py", True),
        ("pkg.a", "pkg/a/__init__.py", True),
        ("pkg.a.b", "pkg/a/b.py", False),
    ]


@pytest.mark.parametrize(("text", "lines"), [("", 0), ("x = 1", 1), ("x = 1\n", 1), ("x = '''\n\x0c\n'''\n", 3)])
def test_lines_are_physical(text: str, lines: int) -> None:
    assert parse_module("pkg/a.py", text).lines == lines


def test_a_file_that_is_not_python_is_named() -> None:
    with pytest.raises(SyntaxError) as error:
        parse_module("pkg/a.py", "def\n")
    assert error.value.filename == "pkg/a.py"


def test_folders_show_what_a_reader_sees(tmp_path: Path) -> None:
    files = ["__init__.py", "py.typed", "a.py", ".hidden", "__pycache__/a.pyc", "left/__pycache__/b.pyc", "page/x.js"]
    root = write_tree(tmp_path, dict.fromkeys(files, ""))
    assert read_folders(root) == {"pkg": ["a.py", "page"], "pkg/left": [], "pkg/page": ["x.js"]}
