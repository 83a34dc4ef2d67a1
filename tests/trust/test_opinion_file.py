"""What audits say of servers, in a file: it is known tomorrow, clients share it, and a broken file is refused."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.errors import OpinionFileError
from swarm.routing.suspicion import HALF_LIFE_S, Agreement, Suspicions
from swarm.trust.opinion_file import MAX_FILE_BYTES, OpinionFile, read_beliefs, read_opinions

SAME, DIFFERENT, UNRELATED = (Agreement.SAME, Agreement.DIFFERENT, Agreement.UNRELATED)


def learned(path: Path, **results: Agreement) -> Suspicions:
    """A client that has audited some servers and has ended."""
    file, suspicions = OpinionFile(path), Suspicions()
    file.load(suspicions)
    for peer, result in results.items():
        suspicions.record(peer, result, time.monotonic())
    asyncio.run(file.save(suspicions))
    return suspicions


def test_what_was_learned_is_known_to_the_next_client(tmp_path):
    path = tmp_path / "opinions.json"
    before = learned(path, good=SAME, bad=UNRELATED)
    after = Suspicions()
    OpinionFile(path).load(after)
    now = time.monotonic()
    assert after.quarantined(now) == frozenset(["bad"])
    assert after.of("good", now).log_odds == pytest.approx(before.of("good", now).log_odds, abs=1e-3)
    assert after.of("new", now).log_odds == pytest.approx(before.of("new", now).log_odds)
    assert after.audit_rate("good", 0.01, now) < 1
    assert {peer: (one.agreed, one.differed) for peer, one in read_opinions(path).items()} == {
        "good": (1, 0),
        "bad": (0, 1),
    }
    assert path.stat().st_mode & 0o777 == 0o600


def test_evidence_fades_while_no_client_runs(tmp_path, monkeypatch):
    path = tmp_path / "opinions.json"
    learned(path, bad=UNRELATED)
    today = read_opinions(path)["bad"].log_odds
    later = time.time() + HALF_LIFE_S
    monkeypatch.setattr(time, "time", lambda: later)
    assert today / 3 < read_opinions(path)["bad"].log_odds < today * 0.6


def test_clients_at_the_same_time_add_to_one_file(tmp_path):
    path = tmp_path / "opinions.json"
    file, first = OpinionFile(path), Suspicions()
    learned(path, two=UNRELATED)
    first.record("one", SAME, time.monotonic())
    asyncio.run(file.save(first))
    assert set(read_opinions(path)) == {"one", "two"}
    assert first.quarantined(time.monotonic()) == frozenset(["two"])


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(Agreement)), min_size=1, max_size=200))
@example([(0, UNRELATED)] * 200)
def test_whatever_was_learned_can_be_read_again(results):
    suspicions, now = Suspicions(), time.monotonic()
    for peer, result in results:
        suspicions.record(str(peer), result, now)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "opinions.json"
        asyncio.run(OpinionFile(path).save(suspicions))
        after = Suspicions()
        OpinionFile(path).load(after)
    assert after.quarantined(now) == suspicions.quarantined(now)
    for peer in {str(peer) for peer, _ in results}:
        assert after.audit_rate(peer, 0.01, now) == pytest.approx(suspicions.audit_rate(peer, 0.01, now), abs=1e-3)


ONE = {"log_odds": 1.0, "when": 1e9, "agreed": 0, "differed": 1}
WHOLE = {"servers": {"peer": ONE}, "strangers": 11.0, "bad_strangers": 2.0, "betrayed_at": 0.0}
BROKEN: dict[str, Any] = {
    "not JSON": b"x",
    "not UTF-8": b'{"servers": "\xff"}',
    "too large": b" " * (MAX_FILE_BYTES + 1),
    "another version": {**WHOLE, "more": 1},
    "no finite number": json.dumps({**WHOLE, "strangers": float("inf")}).encode(),
    "odds beyond all bounds": {**WHOLE, "servers": {"peer": {**ONE, "log_odds": -1e6}}},
    "more liars than servers": {**WHOLE, "bad_strangers": 11.0},
    "too many servers": {**WHOLE, "servers": {str(number): ONE for number in range(5000)}},
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_file_is_refused_and_left_alone(tmp_path, kind):
    path, content = tmp_path / "opinions.json", BROKEN[kind]
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    before = path.read_bytes()
    with pytest.raises(OpinionFileError, match=r"opinions\.json is "):
        OpinionFile(path)
    assert path.read_bytes() == before
    path.write_bytes(json.dumps(WHOLE).encode())
    assert read_beliefs(path).servers["peer"].differed == 1  # type: ignore[union-attr]


def test_files_that_cannot_be_there(tmp_path):
    with pytest.raises(OpinionFileError, match="there is no such folder"):
        OpinionFile(tmp_path / "nowhere" / "opinions.json")
    with pytest.raises(OpinionFileError, match="a client writes it after its first audit"):
        read_opinions(tmp_path / "opinions.json")
    with pytest.raises(OpinionFileError, match="cannot be read"):
        OpinionFile(tmp_path).load(Suspicions())


def test_a_file_that_breaks_while_a_client_runs_does_not_stop_it(tmp_path, caplog):
    path = tmp_path / "opinions.json"
    file, suspicions = OpinionFile(path), Suspicions()
    suspicions.record("peer", SAME, time.monotonic())
    path.write_bytes(b"x")
    asyncio.run(file.save(suspicions))
    assert "cannot be saved" in caplog.text
    assert path.read_bytes() == b"x"
