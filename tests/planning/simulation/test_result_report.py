from __future__ import annotations

import json
import struct
import sys

import pytest

from swarm.data_structures import Span
from swarm.errors import UsageError
from swarm.planning.simulation import result_report
from swarm.planning.simulation.ground_truth import CompletedMove, CoverageGap
from swarm.planning.simulation.result_plot import plot_result
from swarm.planning.simulation.result_statistics import Outage, compute_statistics
from swarm.planning.simulation.runner import RouteSample, SimulationResult, SwarmSample
from swarm.planning.simulation.scenario import Scenario

SCENARIO = Scenario(description="A drama", blocks=8, duration=100, events=(), steady_from=50, sample_every=50)
OUTCOME = SimulationResult(
    SCENARIO,
    seed=3,
    joined=5,
    left=1,
    samples=(
        SwarmSample(0.0, 0.0, 10.0, None, 5, 5, 0, 8),
        SwarmSample(50.0, 8.0, 10.0, 8.0, 4, 5, 1, 0),
        SwarmSample(100.0, 9.0, 10.0, 9.5, 4, 4, 1, 0),
    ),
    routes=(RouteSample(10.0, 0, 0.0, 0), RouteSample(60.0, 3, 0.25, 1)),
    moves=(
        CompletedMove(30.0, "a", Span(0, 2), Span(4, 6), True),
        CompletedMove(60.0, "b", Span(0, 2), Span(4, 6), False),
    ),
    gaps=(CoverageGap(4, 20.0, 40.0), CoverageGap(5, 25.0, 35.0), CoverageGap(7, 90.0, None)),
)


def test_figures():
    found = compute_statistics(OUTCOME)
    assert (found.steady, found.steady_lowest) == (pytest.approx(0.85), 0.8)
    assert found.near_liars == pytest.approx(0.875)
    assert (found.moves, found.steady_moves) == (2, 1)
    assert found.moves_per_server_hour == pytest.approx(1 / (8 * 50 / 3600))
    assert found.outages == (Outage((4, 5), 20.0, 40.0, 30.0), Outage((7,), 90.0, None, None))
    assert (found.routes, found.unroutable, found.outdated, found.hops) == (2, 1, 1, 3)


def test_the_text_says_what_happened():
    text = result_report.format_result(OUTCOME, compute_statistics(OUTCOME))
    assert "A drama" in text
    assert "0.850 of the optimum from 0:00:50 on" in text
    assert "blocks 4:6 from 0:00:20 on, first server decided after 10.0 s, closed after 20.0 s (0.67 update" in text
    assert "blocks 7:8 from 0:01:30 on, still open at the end" in text
    assert "1 included a server that was gone, 1 found no route" in text


def test_json_holds_figures_and_samples():
    data = json.loads(result_report.result_to_json(OUTCOME, compute_statistics(OUTCOME)))
    assert data["figures"]["steady_lowest"] == 0.8
    assert len(data["outcome"]["samples"]) == 3
    assert data["outcome"]["moves"][0]["new"] == {"start": 4, "end": 6}


def test_the_picture_is_a_png_of_1200_pixels(tmp_path):
    path = tmp_path / "plot.png"
    plot_result(OUTCOME, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1200, 900)


def test_a_picture_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        plot_result(OUTCOME, tmp_path / "missing" / "plot.png")


def test_a_picture_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'swarm\[plot\]'"):
        plot_result(OUTCOME, tmp_path / "plot.png")
