from __future__ import annotations

from swarm.data_structures import Span
from swarm.planning.simulation.ground_truth import CoverageGap, GroundTruth


def test_gaps_begin_with_the_last_holder_and_end_with_the_next():
    truth = GroundTruth(4)
    assert truth.all_gaps() == ()  # nobody has served yet: nothing was lost
    for row, span in enumerate((Span(0, 3), Span(1, 4))):
        truth.server_joined(row, 10.0)
        truth.start_serving(row, span, 5.0, False, now=1.0)
    assert truth.throughputs().tolist() == [5.0, 10.0, 10.0, 5.0]
    truth.stop_serving(0, Span(0, 3), now=2.0)
    assert truth.all_gaps() == (CoverageGap(0, 2.0, None),)
    truth.start_serving(2, Span(0, 1), 1.0, False, now=7.0)
    assert truth.all_gaps() == (CoverageGap(0, 2.0, 7.0),)
    assert truth.gaps_now == 0


def test_the_optimum_is_an_even_share_of_those_that_are_there():
    truth = GroundTruth(4)
    truth.server_joined(0, 10.0)
    truth.server_joined(1, 6.0)
    assert truth.optimum == 4.0
    truth.server_left(1)
    assert (truth.optimum, truth.joined, truth.left) == (2.5, 2, 1)


def test_the_blocks_of_liars():
    truth = GroundTruth(4)
    truth.start_serving(0, Span(0, 4), 1.0, False, now=0.0)
    assert truth.near_liars().tolist() == []
    truth.start_serving(1, Span(2, 4), 3.0, True, now=0.0)
    assert truth.near_liars().tolist() == [4.0, 4.0]
