"""What a token costs on flash."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.flash.costs.cost_model import (
    SLAB_BYTES,
    TYPICAL_EXPERT_HITS,
    ComputeSpeed,
    ExpertCosts,
    FlashCostModel,
    MachineSpeed,
    NeuronCosts,
    StreamedCosts,
    describe,
    typical_hits,
)
from swarm.models.flash.sparsity import Sparsity


@dataclass(frozen=True)
class Drive:
    """Reads side by side, each with a latency that `depth` of them share."""

    bytes_per_s: float = 2e9
    latency_s: float = 1e-4
    depth: int = 32

    def seconds(self, reads: float, bytes_each: float) -> float:
        return reads * bytes_each / self.bytes_per_s + self.latency_s * reads / self.depth


LINEAR = ComputeSpeed(((1, 1e-10), (101, 2e-10)))
MACHINE = MachineSpeed(Drive(), LINEAR, LINEAR)
PAPER = Sparsity((0.1, 0.15, 0.188, 0.216, 0.24, 0.264))
OPT = NeuronCosts(134_217_728, 16_384, 16_384, PAPER, slots=round(0.24 * 16_384))
"""A block of OPT-6.7B in 16 bits."""

MIXTURE = ExpertCosts(40_000_000, 9_437_184, 128, Sparsity((8 / 128,)), 32, ((0.0, 0.0), (0.5, 0.8), (1.0, 1.0)))

machines = st.builds(
    MachineSpeed,
    st.builds(Drive, st.floats(1e8, 1e10), st.floats(0, 1e-3), st.integers(1, 64)),
    st.just(LINEAR),
    st.builds(lambda low, more: ComputeSpeed(((1, low), (64, low + more))), st.floats(1e-11, 1e-9), st.floats(0, 1e-8)),
    st.floats(0, 1e-9),
    st.floats(0, 1e-3),
)
neurons = st.builds(
    NeuronCosts,
    st.integers(0, 1 << 30),
    st.integers(1, 64).map(lambda pages: 4096 * pages),
    st.integers(1, 20_000),
    st.just(PAPER),
    st.integers(0, 20_000),
)
experts = st.builds(
    ExpertCosts,
    st.integers(0, 1 << 28),
    st.integers(1, 1 << 20),
    st.integers(8, 128),
    st.just(Sparsity((0.0625,))),
    st.integers(0, 128),
    st.just(((0.0, 0.0), (0.5, 0.8), (1.0, 1.0))),
    st.floats(0, 1),
)
streamed = st.builds(StreamedCosts, st.integers(0, 1 << 28), st.integers(1, 1 << 30))
blocks = st.one_of(neurons, experts, streamed)


def test_a_token_reads_what_its_window_lacks():
    cost = OPT.step(MACHINE, tokens=1, sessions=1)
    assert cost.reads == round(0.024 * 16_384)
    assert cost.bytes == cost.reads * 16_384
    assert cost.reading_s == Drive().seconds(cost.reads, 16_384)


def test_what_is_there_is_computed_while_the_rest_is_read():
    cost = OPT.step(MACHINE, tokens=1, sessions=1)
    resident_s = 134_217_728 * 1e-10
    there_s = 0.076 * 16_384 * 16_384 * 1e-10
    assert cost.seconds == pytest.approx(resident_s + max(cost.reading_s, there_s) + cost.bytes * 1e-10, rel=1e-3)


def test_a_batch_takes_longer_and_reads_more_but_less_for_each_token():
    one, eight = OPT.step(MACHINE, 1, 1), OPT.step(MACHINE, 1, 8)
    assert one.seconds < eight.seconds < 8 * one.seconds
    assert one.bytes < eight.bytes


def test_experts_that_are_there_are_not_read():
    assert MIXTURE.step(MACHINE, 1, 1).reads == pytest.approx(8 * (1 - 0.4))
    assert dataclasses.replace(MIXTURE, slots=128).step(MACHINE, 1, 1).reads == 0
    assert dataclasses.replace(MIXTURE, slots=0).step(MACHINE, 1, 1).reads == 8


def test_hits_depend_on_the_tokens_whose_experts_fit():
    assert typical_hits(8 / 128) == (*TYPICAL_EXPERT_HITS, (1.0, 1.0))
    assert typical_hits(8 / 256) == typical_hits(8 / 128), "never more than was measured"
    mixtral = dict(typical_hits(2 / 8))
    assert mixtral == {0.0: 0.0, 0.5: 0.56, 1.0: 1.0}
    assert typical_hits(1.0) == ((0.0, 0.0), (1.0, 1.0)), "each token needs all"


@given(st.floats(0.01, 1))
def test_more_room_never_finds_less(needed):
    points = typical_hits(needed)
    assert list(points) == sorted(set(points))
    assert all(share <= hits <= 1 for share, hits in points)
    assert [hits for _, hits in points] == sorted(hits for _, hits in points)


def test_few_experts_are_read_now_and_then():
    """Of two experts, four tokens in ten lack one."""
    few = dataclasses.replace(MIXTURE, records=8, needed=Sparsity((0.25,)), slots=2, hits=((0.0, 0.0), (0.25, 0.8)))
    whole, cost = dataclasses.replace(few, slots=8).step(MACHINE, 1, 1), few.step(MACHINE, 1, 1)
    assert cost.reads == pytest.approx(0.4)
    assert cost.bytes == round(cost.reads * few.stride)
    assert cost.reading_s == pytest.approx(
        0.32 * Drive().seconds(1, few.stride) + 0.04 * Drive().seconds(2, few.stride)
    )
    assert cost.computing_s == pytest.approx(whole.computing_s)
    assert cost.seconds > whole.seconds


def test_look_ahead_hides_reading_behind_the_attention_only():
    plain = MIXTURE.step(MACHINE, 1, 1)
    ahead = dataclasses.replace(MIXTURE, ahead=1.0).step(MACHINE, 1, 1)
    assert plain.seconds - ahead.seconds == pytest.approx(40_000_000 * 1e-10, rel=0.02)  # but where nothing is read
    assert plain.reading_s == ahead.reading_s


def test_streamed_blocks_take_the_longer_of_reading_and_computing():
    block = StreamedCosts(0, 400_000_000)
    cost = block.step(MACHINE, 1, 1)
    assert cost.seconds == cost.reading_s == Drive().seconds(382, SLAB_BYTES)
    assert block.step(MACHINE, 1, 1000).seconds == pytest.approx(400_000_000 * 1.1e-9, rel=0.01)


def test_tokens_that_are_computed_together():
    assert LINEAR.seconds(1e10, 51) == pytest.approx(1.5)
    assert LINEAR.seconds(1e10, 201) == pytest.approx(3.0), "beyond what was measured, more tokens take more time"


@given(machines, st.lists(blocks, min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 32))
def test_a_span_takes_at_least_its_reading_and_its_computing_and_at_most_both(machine, span, tokens, sessions):
    cost = FlashCostModel(machine, span).step(tokens, sessions)
    longest = max(cost.reading_s, cost.computing_s)
    assert longest * (1 - 1e-9) <= cost.seconds <= (cost.reading_s + cost.computing_s) * (1 + 1e-9)


@given(machines, neurons, st.integers(1, 16))
def test_more_memory_never_reads_more(machine, block, sessions):
    slots = [round(block.records * share / 20) for share in range(21)]
    read = [dataclasses.replace(block, slots=some).step(machine, 1, sessions).bytes for some in slots]
    assert read == sorted(read, reverse=True)
    assert read[-1] == 0, "nothing is read if everything fits"


@given(machines, st.lists(blocks, min_size=1, max_size=3), st.floats(0.001, 10))
def test_the_budget_takes_no_longer_than_its_limit_unless_reading_takes_longer(machine, span, limit_s):
    model = FlashCostModel(machine, span)
    budget = model.token_budget(limit_s, 4096)
    if budget > 1:
        half = model.prompt(budget // 2)
        assert model.prompt(budget).seconds <= limit_s or half.reading_s > half.computing_s


def test_streamed_blocks_get_a_budget_that_is_worth_the_reading():
    model = FlashCostModel(MACHINE, [StreamedCosts(0, 400_000_000)])
    assert model.token_budget(0.01, 4096) > 64
    assert model.token_budget(0.01, 32) == 32


def test_the_line_for_the_start_of_a_server():
    line = describe(FlashCostModel(MACHINE, [OPT] * 4), memory=300_000_000)
    assert line.startswith("Flash: 4 blocks, 1.1 GB on the drive, 0.3 GB of them in memory; a token reads")
    assert "a token reads 25.8 MB (2.4%) in 1572 reads of 16 KiB" in line
