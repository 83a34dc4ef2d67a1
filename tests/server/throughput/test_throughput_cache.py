"""The file of remembered results: never in the way, whatever is in it."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import InvalidOption
from swarm.server.throughput import throughput_cache
from swarm.server.throughput.throughput_cache import (
    MAX_AGE_S,
    MAX_CLOCK_ERROR_S,
    MAX_ENTRIES,
    MAX_FILE_BYTES,
    MeasurementConditions,
    Throughput,
    ThroughputOption,
    default_path,
    lookup,
    remember,
)

CONDITIONS = [field.name for field in dataclasses.fields(MeasurementConditions)]
HERE = MeasurementConditions("CPU, 2 threads", "model", "main", "0:6", "float32", "none", "swarm 1, torch 2")
FAST = Throughput(100.0, 5000.0)
NOW = 1.8e9


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "throughput.json"


def entries(path: Path) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(path.read_text())["entries"]
    return found


def test_what_was_measured_is_known(path):
    remember(path, HERE, FAST, NOW)
    assert lookup(path, HERE, NOW + 1) == FAST
    assert sorted(file.name for file in path.parent.iterdir()) == ["throughput.json", "throughput.lock"]


def test_a_new_result_takes_the_place_of_the_old_one(path):
    remember(path, HERE, FAST, NOW)
    remember(path, HERE, Throughput(7.0, 8.0), NOW + 1)
    assert lookup(path, HERE, NOW + 1) == Throughput(7.0, 8.0)
    assert len(entries(path)) == 1


def test_results_age_and_those_of_the_future_do_not_count(path):
    remember(path, HERE, FAST, NOW)
    assert lookup(path, HERE, NOW + MAX_AGE_S - 1) == FAST
    assert lookup(path, HERE, NOW + MAX_AGE_S + 1) is None
    assert lookup(path, HERE, NOW - 1) == FAST  # clocks differ a little
    assert lookup(path, HERE, NOW - 2 * MAX_CLOCK_ERROR_S) is None


def test_the_oldest_results_make_room(path):
    for number in range(MAX_ENTRIES + 3):
        remember(path, dataclasses.replace(HERE, model=str(number)), FAST, NOW + number)
    later = NOW + MAX_ENTRIES + 3
    known = [n for n in range(MAX_ENTRIES + 3) if lookup(path, dataclasses.replace(HERE, model=str(n)), later)]
    assert known == list(range(3, MAX_ENTRIES + 3))
    assert path.stat().st_size < MAX_FILE_BYTES


GOOD = {
    "conditions": {name: getattr(HERE, name) for name in CONDITIONS},
    "decode": 100.0,
    "forward": 5000.0,
    "measured": NOW,
}


def written(**changes: object) -> bytes:
    return json.dumps({"entries": [{**GOOD, **changes}]}).encode()


BROKEN = [
    b"",
    b"{}",
    b"null",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"entries":' * 100_000,
    written()[:-1],
    written() + b"x",
    written(decode=0),
    written(decode=-1.0),
    written(decode=math.inf),
    written(decode=math.nan),
    written(decode=10**400),
    written(forward="fast"),
    written(forward=None),
    written(measured=None),
    written(measured=10**400),
    written(conditions={}),
    written(conditions="here"),
    written() + b" " * MAX_FILE_BYTES,
]


def test_a_broken_file_is_ignored_and_written_anew(path):
    path.parent.mkdir()
    for data in BROKEN:
        path.write_bytes(data)
        assert lookup(path, HERE, NOW) is None
        remember(path, HERE, FAST, NOW)
        assert lookup(path, HERE, NOW) == FAST
        assert len(entries(path)) == 1


@given(st.data())
def test_a_damaged_file_is_survived(data):
    damaged = bytearray(written())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "throughput.json"
        path.write_bytes(damaged)
        found = lookup(path, HERE, NOW)
        assert found is None or (0 < found.decode <= 1e9 and 0 < found.forward <= 1e9)
        remember(path, HERE, FAST, NOW)
        assert lookup(path, HERE, NOW) == FAST


def test_a_place_that_cannot_be_written_is_survived(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "throughput.json", Path("/proc/nowhere/throughput.json")):
        remember(path, HERE, FAST, NOW)
        assert lookup(path, HERE, NOW) is None


def test_a_lock_that_stays_taken_is_passed_over(path, monkeypatch):
    monkeypatch.setattr(throughput_cache, "LOCK_TIMEOUT_S", 0.05)
    remember(path, HERE, FAST, NOW)
    with open(path.with_suffix(".lock"), "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remember(path, HERE, Throughput(1.0, 1.0), NOW)
    assert lookup(path, HERE, NOW) == Throughput(1.0, 1.0)


WRITER = """
import sys
from pathlib import Path
from swarm.server.throughput.throughput_cache import MeasurementConditions, Throughput, remember

path, name = Path(sys.argv[1]), sys.argv[2]
for number in range(10):
    here = MeasurementConditions("CPU", name, str(number), "0:1", "float32", "none", "1")
    remember(path, here, Throughput(1.0 + number, 1.0), 1.8e9 + number)
"""


def test_servers_that_write_at_once_lose_nothing(path):
    names = ("one", "two", "three")
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in names]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    for name in names:
        for number in range(10):
            here = MeasurementConditions("CPU", name, str(number), "0:1", "float32", "none", "1")
            assert lookup(path, here, NOW + 100) == Throughput(1.0 + number, 1.0)


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("/some/where", "/some/where"),
        ("", "/home/me/.cache"),
        ("relative", "/home/me/.cache"),
        (None, "/home/me/.cache"),
    ],
)
def test_where_the_file_lies(monkeypatch, variable, expected):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
    assert default_path() == Path(expected) / "swarm" / "throughput.json"


def test_what_the_option_says():
    for text, wanted in [
        ("auto", ThroughputOption()),
        ("measure", ThroughputOption(remeasure=True)),
        ("12.5", ThroughputOption(12.5)),
        ("1e3", ThroughputOption(1000.0)),
    ]:
        assert ThroughputOption.parse(text) == wanted


def test_what_the_option_does_not_say():
    for text in [
        "",
        "fast",
        "0",
        "-1",
        "nan",
        "inf",
        "-inf",
        "1e9",
        "1e400",
        "AUTO",
        "1;2",
    ]:
        with pytest.raises(InvalidOption, match="use auto, measure or a number"):
            ThroughputOption.parse(text)
