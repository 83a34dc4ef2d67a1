"""How the kernel is told of a batch's sequences, and which masks it supports."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from swarm.models.attention.multi_session_attention import PackingUnsupported
from swarm.models.attention.paged_attention import BatchSequence, build_index, window_of

CPU = torch.device("cpu")


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=5), st.integers(1, 6))
def test_every_token_has_the_slot_of_its_position(rows, page):
    members, pages = [], iter(range(1, 1000))
    for start, new in rows:
        members.append(BatchSequence([next(pages) for _ in range(-(-(start + new) // page))], start, new))
    index = build_index(members, page, CPU)
    token = 0
    for row, member in enumerate(members):
        assert index.bounds[row] == token
        assert index.lengths[row] == member.end
        for position in range(member.start, member.end):
            place = int(index.slots_N[token])
            assert (int(index.table[row, position // page]), position % page) == divmod(place, page)
            token += 1
    assert index.bounds[-1] == token == len(index.slots_N) == len(set(index.slots_N.tolist()))
    assert index.most_new == max(new for _, new in rows)
    assert index.longest == max(member.end for member in members)
    assert {index.bounds.dtype, index.lengths.dtype, index.table.dtype} == {torch.int32}


def test_the_rules_that_the_kernel_knows():
    assert window_of(causal_mask_function) == (-1, 0)
    for size in (1, 2, 6, 4096):
        assert window_of(sliding_window_causal_mask_function(size)) == (size - 1, 0)


@pytest.mark.parametrize(
    "function",
    [
        chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        sliding_window_bidirectional_mask_function(4),
        or_masks(sliding_window_overlay(4), causal_mask_function),
        and_masks(sliding_window_overlay(4), causal_mask_function, sliding_window_overlay(2)),
        and_masks(causal_mask_function, sliding_window_overlay(4)),
        and_masks(sliding_window_overlay(4)),
        sliding_window_overlay(4),
        sliding_window_causal_mask_function(torch.tensor(4)),
        sliding_window_causal_mask_function(0),
        lambda batch, head, query, key: key <= query,
        print,
    ],
)
def test_other_rules_are_not_taken_for_them(function):
    with pytest.raises(PackingUnsupported):
        window_of(function)


def test_a_window_that_means_something_else_is_found_out(monkeypatch):
    """Such as one that a later transformers counts without the token itself."""
    from swarm.models.attention import paged_attention as page_attention

    def another(size):
        return and_masks(sliding_window_overlay(size + 1), causal_mask_function)

    monkeypatch.setattr(page_attention, "sliding_window_causal_mask_function", another)
    page_attention._is_window.cache_clear()
    with pytest.raises(PackingUnsupported):
        window_of(another(5))
    monkeypatch.undo()
    page_attention._is_window.cache_clear()
    assert window_of(sliding_window_causal_mask_function(5)) == (4, 0)
