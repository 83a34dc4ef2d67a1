"""Warnings that are in the log once."""

from __future__ import annotations

import logging

import pytest

from swarm.common import warn_once
from swarm.common.warn_once import WarnOnce


def test_each_is_written_once(caplog: pytest.LogCaptureFixture) -> None:
    warn = WarnOnce(logging.getLogger("swarm.test"), "demo: ")
    for message in ("one", "two", "one"):
        warn(message)
    assert caplog.messages == ["demo: one", "demo: two"]
    WarnOnce(logging.getLogger("swarm.test"))("one")
    assert caplog.messages[2:] == ["one"]


def test_an_error_is_written_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    warn = WarnOnce(logging.getLogger("swarm.test"))
    for number in range(2):
        warn("it failed", RuntimeError(f"reason {number}"))
    assert [(record.getMessage(), str((record.exc_info or [None, None])[1])) for record in caplog.records] == [
        ("it failed", "reason 0")
    ]


def test_it_remembers_the_latest(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warn_once, "MAX_REMEMBERED", 2)
    warn = WarnOnce(logging.getLogger("swarm.test"))
    for message in ("a", "b", "a", "c", "a", "b"):
        warn(message)
    assert caplog.messages == ["a", "b", "c", "b"], "b was said longest ago when c came"
