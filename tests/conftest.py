"""Settings for all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

if TYPE_CHECKING:
    from playwright.sync_api import Browser

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may look for a hub

# How long an example takes depends on what else runs on the machine. Continuous integration tries the same examples
# each time, so that a failure is that of the change; other examples are found where tests run before a commit.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("default")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Tests run side by side on few cores."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Real server processes remember their throughput, but not where the person who runs the tests keeps hers."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; `tests.browser.open_page` gives each test a visitor of its own.

    One a module: while Playwright runs, nothing else can run an event loop in this thread.
    """
    from tests.browser import run_browser

    with run_browser() as running:
        yield running
