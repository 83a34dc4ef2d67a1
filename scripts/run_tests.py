"""Runs tests with pytest, and those that fail once more at the end, each alone.

    python -m scripts.run_tests [ARGUMENTS OF PYTEST]

What fails twice has failed. What passes when no other test runs beside it is named in the last lines as `flaky: NAME`;
up to five such tests are forgiven, because a busy machine is not the fault of a change. Each of them is still a bug,
of the test or of what it tests.

Exits with pytest's own code, which is 0 if all that failed was forgiven.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

MAX_FLAKY = 5
"""Tests that may fail beside others and pass alone."""

MAX_RETRIES = 20
"""If more tests fail, none is tried again: the machine was not the reason."""


class FailedTests:
    """A plugin of pytest that notes which tests have failed, in order: in their set-up, their call or their end."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid not in self.names:
            self.names.append(report.nodeid)


def run(arguments: Sequence[str]) -> int:
    """Run the tests; the exit code."""
    failed = FailedTests()
    code = pytest.main([*arguments], plugins=[failed])
    if code != pytest.ExitCode.TESTS_FAILED or not failed.names:
        return int(code)
    if len(failed.names) > MAX_RETRIES:
        print(f"{len(failed.names)} tests failed; only up to {MAX_RETRIES} are tried once more", flush=True)
        return int(code)
    flaky, twice = [], []
    for name in failed.names:
        print(f"\nTrying {name} once more, alone", flush=True)
        (flaky if _passes(name) else twice).append(name)
    for name in twice:
        print(f"failed twice: {name}")
    for name in flaky:
        print(f"flaky: {name}")
    if len(flaky) > MAX_FLAKY:
        print(f"{len(flaky)} tests are flaky; up to {MAX_FLAKY} are forgiven")
    return int(code) if twice or len(flaky) > MAX_FLAKY else 0


def _passes(name: str) -> bool:
    """Whether a test passes in a process of its own."""
    return subprocess.run([sys.executable, "-m", "pytest", "-p", "no:xdist", name], check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
