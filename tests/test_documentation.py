"""The pages name modules, files and classes that exist, and link to pages and headings that exist."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "swarm"
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))
]  # fmt: skip
ROOMS = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
DOTTED = re.compile(r"(?<![\w.-])swarm(?:\.[A-Za-z_]\w*)+")
IN_ROOM = re.compile(rf"(?:{'|'.join(sorted(ROOMS))})(?:\.[A-Za-z_]\w*)+")
FOLDERS = ("swarm", "tests", "docs", "benchmarks", "examples", "docker", "scripts")
FILE = re.compile(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w/?")
MODULE_RUN = re.compile(r"python -m ([\w.]+)")
CLASS_NAME = re.compile(r"([A-Z][a-z]\w*)(?:[.(].*)?")

MEMBER = re.compile(r"[A-Z][a-z]\w*\.(\w+)")

OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")

DOCKER_OPTIONS = {"--env", "--init"}

FOREIGN = {"Conv1D", "None", "PyYAML"}
"""Names from elsewhere that look like classes of ours."""


def label(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def defined(module: Path) -> frozenset[str]:
    """What a module defines or imports at its top level, and the strings in it, which may name lazy imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(module.read_text())):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Constant(value=str(name)) | ast.alias(name=name):
                names.add(name)
            case ast.Attribute(attr=name):
                names.add(name)
    return frozenset(names)


@cache
def classes() -> frozenset[str]:
    """The classes and type aliases of the package."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name) | ast.Assign(targets=[ast.Name(id=name)]):
                    names.add(name)
    return frozenset(names)


def exists(dotted: str) -> bool:
    """Whether `swarm.room.module.Name` exists: the module as a file, the names in it."""
    path, names = ROOT, dotted.split(".")
    while names and (path / names[0]).is_dir():
        path /= names.pop(0)
    if names and (path / f"{names[0]}.py").is_file():
        path = path / f"{names.pop(0)}.py"
    elif names:
        path /= "__init__.py"
    return not names or (path.is_file() and names[0] in defined(path) and all(one in source() for one in names[1:]))


@cache
def source() -> frozenset[str]:
    """Every word of the package's source."""
    return frozenset(word for path in PACKAGE.rglob("*.py") for word in re.findall(r"\w+", path.read_text()))


def on_every_page(check: Callable[[Path], None]) -> Callable[[], None]:
    """One test for all pages; pytest shows the page of a failure among its local variables."""

    def test() -> None:
        for page in PAGES:
            check(page)

    return test


def backticked(page: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text()))


@on_every_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        target, _, anchor = link.partition("#")
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), f"{label(page)} links to {link}"
        assert not anchor or anchor in anchors(found), f"{label(page)} links to {link}"


@on_every_page
def test_modules_exist(page: Path) -> None:
    text = page.read_text()
    named = set(DOTTED.findall(text)) | set(MODULE_RUN.findall(text))
    named |= {f"swarm.{found[0]}" for one in backticked(page) if (found := IN_ROOM.fullmatch(one))}
    missing = {name for name in named if name.split(".")[0] in FOLDERS and not exists(name)}
    assert not missing


@on_every_page
def test_files_exist(page: Path) -> None:
    missing = {path for path in FILE.findall(page.read_text()) if not (ROOT / path).exists()}
    assert not missing


@on_every_page
def test_classes_exist(page: Path) -> None:
    named = {match[1] for one in backticked(page) if (match := CLASS_NAME.fullmatch(one))}
    assert named <= classes() | FOREIGN
    members = {match[1] for one in backticked(page) if (match := MEMBER.match(one))}
    assert members <= source()


@cache
def options() -> frozenset[str]:
    """The command-line options of the project's programs."""
    folders = ("swarm", "benchmarks", "scripts", "examples", "tests/fuzz")
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return frozenset(option for path in files for option in OPTION.findall(path.read_text()))


@on_every_page
def test_options_exist(page: Path) -> None:
    named = {option for one in backticked(page) for option in OPTION.findall(one)}
    assert named <= options() | DOCKER_OPTIONS


@on_every_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^    )make ([a-z][\w-]*)", page.read_text(), re.MULTILINE)) <= targets


def test_the_way_of_a_token_names_modules() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    steps = re.findall(r"^    ([a-z]\w*(?:\.\w+)+)  +(.*)$", page, re.MULTILINE)
    assert len(steps) > 15
    for module, does in steps:
        assert exists(f"swarm.{module}"), module
        assert set(re.findall(r"\b[A-Z][a-z]+[A-Z]\w*", does)) <= classes(), module


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = sorted(page.name for page in folder.glob("[0-9]*.md"))
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    assert sorted(set(LINK.findall((folder / "README.md").read_text())) & set(pages)) == pages
    for page in pages:
        assert (folder / page).read_text().startswith(f"# {int(page[:4])}. "), page


def test_every_dependency_has_a_reason() -> None:
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    required = re.findall(r"^[\w-]+", options["options"]["install_requires"], re.MULTILINE)
    page = (ROOT / "docs" / "decisions" / "0029-dependencies.md").read_text()
    reasons = " ".join(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE))
    assert required
    assert [name for name in required if not re.search(rf"\b{name}\b", reasons)] == []
