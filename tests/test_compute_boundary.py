"""What computes imports without the packages of what talks, which a machine with a GPU need not have."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import swarm

ROOT = Path(swarm.__file__).parents[1]
CONTRACT = "What computes works without what talks"

IMPORT_ALL = """
import importlib, pkgutil, sys

rooms, blocked = (argument.split(",") for argument in sys.argv[1:])
for name in blocked:
    sys.modules[name] = None  # as if it were not installed
for room in rooms:
    module = importlib.import_module(room)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), room + "."):
        importlib.import_module(found.name)
print(*sys.modules)
"""


def contract() -> dict[str, list[str]]:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (found,) = [one for one in pyproject["tool"]["importlinter"]["contracts"] if one["name"] == CONTRACT]
    return found


def import_all(rooms: list[str], blocked: list[str]) -> subprocess.CompletedProcess[str]:
    arguments = [",".join(rooms), ",".join(blocked)]
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )


def test_rooms_that_compute_import_without_what_talks():
    rooms, blocked = contract()["source_modules"], contract()["forbidden_modules"]
    assert {"hivemind", "multiaddr", "msgspec", "llguidance", "bitsandbytes", "yaml"} <= set(blocked)
    blocked.remove("yaml")  # huggingface_hub imports it, but none of ours does: the contract sees that
    done = import_all(rooms, blocked)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.split())
    assert {"swarm.models.execution.span_model", "swarm.models.loading.span_loading", *rooms} <= imported


def test_a_room_that_talks_does_not():
    """So that the first test is able to fail."""
    done = import_all(["swarm.protocol"], ["msgspec"])
    assert done.returncode == 1
    assert "import of msgspec halted" in done.stderr
