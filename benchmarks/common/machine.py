"""Describes the machine and the software versions of a measurement."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("numpy", "torch", "transformers", "hivemind", "bitsandbytes")


def describe() -> dict[str, str]:
    """Return the processor, the number of cores, and versions."""
    return {
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
    }


def version_of(package: str) -> str:
    """The installed version of a package, or that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
            if name:
                return name
    return platform.machine()
