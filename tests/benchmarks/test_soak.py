"""A short soak: half a minute of churn changes no token and reaches no client. `make soak` runs the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.serving.churn import make_texts, run_churn
from benchmarks.serving.soak import draw, failures, table


@pytest.mark.slow
def test_half_a_minute_of_churn(tmp_path: Path) -> None:
    churn = run_churn(seconds=22.0, clients=2, every=3.0, seed=1, texts=make_texts(new=48), min_kills=5)
    assert failures(churn) == []
    assert {written.client for written in churn.written} == {0, 1}
    assert len(churn.kills) >= 5
    assert len(churn.clients) == 2
    assert f"| kills | {len(churn.kills)}," in table(churn)
    draw(churn, tmp_path / "soak.png")
    assert (tmp_path / "soak.png").stat().st_size > 10_000
