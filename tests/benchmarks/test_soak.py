"""A short soak: half a minute of churn changes no token and reaches no client. `make soak` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common.peer_memory import MemorySample, PeerMemory
from benchmarks.serving.churn import SPARED, ChurnResult, run_churn
from benchmarks.serving.churn_client import Ban, GeneratedText, make_texts
from benchmarks.serving.soak import LONG_LIFE_S, MAX_GROWTH_BYTES, draw, failures, memory_table, table
from swarm.routing.peer_health import PeerFailure


@pytest.mark.slow
def test_half_a_minute_of_churn(tmp_path: Path) -> None:
    churn = run_churn(seconds=22.0, clients=2, every=3.0, seed=1, texts=make_texts(new=48), min_kills=5)
    assert failures(churn) == []
    assert {written.client for written in churn.written} == {0, 1}
    assert len(churn.kills) >= 5
    assert set(churn.memory) == {"client 0", "client 1", *(f"server {span}" for span in SPARED), "bootstrap peer"}
    assert all(peer.samples[-1].daemon > 0 for peer in churn.memory.values())
    assert f"| kills | {len(churn.kills)}," in table(churn)
    assert "| bootstrap peer |" in memory_table(churn)
    draw(churn, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 10_000


def result(**what: object) -> ChurnResult:
    return ChurnResult(0.0, [GeneratedText(0, right=True, tokens=4, gaps=[0.1])], ended=10.0, **what)


def test_a_ban_of_a_server_that_was_killed_before_is_right_and_any_other_is_wrong():
    bans = [Ban(5.0, peer_id, PeerFailure.TIMED_OUT) for peer_id in ("killed before", "killed later", "alive")]
    churn = result(killed={"killed before": 4.9, "killed later": 5.1})
    churn.written[0].bans = bans
    assert churn.wrong_bans == bans[1:]
    assert "| bans | 3, of them 2 of living servers (did not answer in time: 2) |" in table(churn)
    assert failures(churn) == ["living servers were taken to have failed: did not answer in time: 2"]


@pytest.mark.parametrize(
    ("life_s", "grown_bytes", "is_failure"),
    [(LONG_LIFE_S, 4 * MAX_GROWTH_BYTES, True), (LONG_LIFE_S, MAX_GROWTH_BYTES, False), (600.0, 2**30, False)],
)
def test_growth_counts_in_a_long_life(life_s, grown_bytes, is_failure):
    samples = [MemorySample(life_s * part / 100, grown_bytes * part // 100, 0) for part in range(101)]
    assert bool(failures(result(memory={"client 0": PeerMemory(samples)}))) == is_failure
