"""Which tokens leave, and what that costs."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.early_exit.leaving import AtExit, leave, quality

BLOCKS, EXITS = 12, (3, 6, 9)
thresholds = st.floats(0, 1)


def confidences(seed: int, windows: int = 8, tokens: int = 6) -> dict[int, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {block: torch.rand(windows, tokens, generator=draw) for block in EXITS}


def text(seed: int) -> tuple[dict[int, AtExit], AtExit]:
    draw = torch.Generator().manual_seed(seed)

    def one() -> AtExit:
        return AtExit({}, torch.randint(0, 5, (8, 6), generator=draw), torch.rand(8, 6, generator=draw))

    return {block: one() for block in EXITS}, one()


@given(st.integers(0, 100), thresholds)
def test_a_row_leaves_at_the_first_exit_where_it_is_sure(seed, threshold):
    given_ones = confidences(seed)
    left = leave(given_ones, threshold, 1, "row")
    for window in range(8):
        for token in range(6):
            sure = [block for block in EXITS if given_ones[block][window, token] > threshold]
            assert int(left[window, token]) == (sure[0] if sure else 0)


@given(st.integers(0, 100), thresholds, st.sampled_from([2, 4, 8]))
def test_a_batch_leaves_as_a_whole_when_its_last_row_has_been_sure(seed, threshold, batch):
    given_ones = confidences(seed)
    alone, together = (leave(given_ones, threshold, batch, rule) for rule in ("row", "all"))
    never = BLOCKS
    groups = torch.where(alone == 0, never, alone).view(-1, batch, 6)
    expected = groups.max(1).values.repeat_interleave(batch, 0)
    assert torch.where(together == 0, never, together).equal(expected)


def test_a_text_that_no_token_leaves_is_the_full_models():
    found, full = text(0)
    worth = quality(leave(confidences(0), 1.0, 1, "row"), found, full, BLOCKS)
    assert (worth.left, worth.skipped, worth.agreement, worth.perplexity) == (0, 0, 1, 0)
