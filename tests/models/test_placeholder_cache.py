"""The client's bookkeeping against a plain model of what a cache holds: one list of tokens for each row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.models.placeholder_cache import PlaceholderCache


class Session:
    """Stands for the object that has the cache."""


SESSION = Session()


def tokens_of(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows)


def step(cache: PlaceholderCache, tokens: torch.Tensor, mask: torch.Tensor | None = None):
    rows, new = tokens.shape
    layout, fresh = cache.layout(rows, new, mask)
    cache.commit(rows, new, fresh, tokens)
    return layout


def test_padding_is_never_sent():
    cache = PlaceholderCache(SESSION)
    mask = torch.tensor([[0, 0, 1], [1, 1, 1]])
    layout, fresh = cache.layout(2, 3, mask)
    assert (layout.starts, layout.counts) == ((0, 0), (1, 3))
    assert fresh.tolist() == [[False, False, True], [True, True, True]]
    cache.commit(2, 3, fresh, None)
    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    layout, fresh = cache.layout(2, 1, longer)
    assert (layout.starts, layout.counts, fresh) == ((1, 3), (1, 1), None)


def test_what_is_exact_ends_at_the_first_slot_that_may_be_approximate():
    cache = PlaceholderCache(SESSION)
    step(cache, tokens_of([[1, 2, 3]]))
    assert cache.exact_length == 3
    cache.commit(1, 1, None, tokens_of([[4]]), is_exact=False)
    cache.commit(1, 2, None, tokens_of([[5, 6]]))
    assert cache.exact_length == 3
    cache.set_length(4)
    assert cache.exact_length == 3
    cache.set_length(2)
    cache.commit(1, 2, None, tokens_of([[7, 8]]))
    assert cache.exact_length == 4


def test_a_changed_mask_is_refused():
    cache = PlaceholderCache(SESSION)
    step(cache, tokens_of([[1, 2, 3]]), torch.tensor([[0, 1, 1]]))
    with pytest.raises(ValueError, match="mask changed"):
        cache.layout(1, 1, torch.tensor([[1, 1, 1, 1]]))
    with pytest.raises(ValueError, match=r"has to be \[1, 4\]"):
        cache.layout(1, 1, torch.tensor([[1]]))
    with pytest.raises(ValueError, match="1 sequences and cannot continue with 2"):
        cache.layout(2, 1, None)


def test_reordering_travels_with_the_next_step_once():
    cache = PlaceholderCache(SESSION)
    step(cache, tokens_of([[1], [2], [3]]))
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    cache.reorder_cache(torch.tensor([1, 0, 2]))
    assert cache.tokens.tolist() == [[3], [3], [1]]
    assert step(cache, tokens_of([[4], [5], [6]])).sources == (2, 2, 0)
    assert step(cache, tokens_of([[7], [8], [9]])).sources is None


def test_rows_can_be_repeated_and_picked():
    cache = PlaceholderCache(SESSION)
    step(cache, tokens_of([[1], [2]]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.batch_select_indices(torch.tensor([0, 3]))
    assert step(cache, tokens_of([[5], [6]])).sources == (0, 1)


def test_rolling_back():
    cache = PlaceholderCache(SESSION)
    step(cache, tokens_of([[1, 2, 3, 4]]), torch.tensor([[0, 1, 1, 1]]))
    cache.crop(-2)
    assert cache.get_seq_length() == 2
    assert step(cache, tokens_of([[9]]), torch.tensor([[0, 1, 1]])).starts == (1,)
    with pytest.raises(ValueError, match="between 0 and 3"):
        cache.set_length(4)
    cache.reset()
    assert cache.batch_size == -1
    assert step(cache, tokens_of([[1], [2], [3]])).sequences == 3


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=6, max_size=6), min_size=2, max_size=2),
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=2, max_size=2),
    st.integers(0, 4),
)
def test_the_common_prefix_is_the_longest_one(known: list[list[int]], asked: list[list[int]], pad: int) -> None:
    width = min(map(len, asked))
    prompt = torch.tensor([row[:width] for row in asked])
    cache = PlaceholderCache(SESSION)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :pad] = 0
    step(cache, torch.tensor(known), mask)
    asked_mask = torch.ones(2, width, dtype=torch.long)
    asked_mask[0, :pad] = 0
    expected = 0
    while expected < min(6, width) and all(known[row][expected] == int(prompt[row, expected]) for row in range(2)):
        expected += 1
    assert cache.common_prefix(prompt, asked_mask) == expected
    if pad and width:
        assert cache.common_prefix(prompt, None) == 0
    assert cache.common_prefix(prompt[:1], asked_mask[:1]) == 0


def test_tokens_are_unknown_once_hidden_states_came_without_them():
    cache = PlaceholderCache(SESSION)
    step(cache, tokens_of([[1, 2]]))
    cache.commit(1, 1, None, None)
    assert cache.tokens is None
    assert cache.common_prefix(tokens_of([[1, 2]]), None) == 0
