"""How the campaign judges what processes tell: the pure parts."""

from __future__ import annotations

import json

from tests.fuzz.watchers import Taken, not_returned, wrong_in_log


def test_what_is_kept_is_named_beyond_what_may_be_open_besides():
    before = Taken(0, 0, tasks=5, files=10, sessions=0, cache_tokens=0, charged=0)
    now = Taken(1 << 30, 0, tasks=13, files=27, sessions=1, cache_tokens=0, charged=0)
    assert not_returned(before, now) == ["files 10 -> 27", "sessions 0 -> 1"]


def test_what_a_log_may_not_hold():
    for line, wrong in [
        ("", ""),
        (json.dumps({"level": "WARNING", "message": "slow"}), ""),
        (json.dumps({"level": "ERROR", "message": "broken"}), "broken"),
        (json.dumps({"level": "INFO", "message": "m", "exception": "Traceback"}), "m Traceback"),
        ("Fatal Python error", "Fatal Python error"),
        ("[1]", "[1]"),
    ]:
        assert wrong_in_log(line) == wrong
