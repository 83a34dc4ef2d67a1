"""Where virtual tokens stand, against writing each row down by itself."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.tuning.virtual_tokens import IGNORED_LABEL, PromptedCache, virtual_token_layout

COUNT = 3
VIRTUAL = torch.tensor([-1, -2, -3])


class Session:
    """Stands for the object that has the cache."""


SESSION = Session()


@st.composite
def masks(draw: st.DrawFn) -> torch.Tensor:
    """Rows of the same width, padded on the left, on the right, on both sides, or all over."""
    slots = draw(st.integers(1, 6))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, slots))
        last = draw(st.integers(first, slots))
        rows.append([int(first <= slot < last) for slot in range(slots)])
    return torch.tensor(rows)


def lead(row: list[int]) -> int:
    return row.index(1) if 1 in row else len(row)


@given(masks())
def test_virtual_tokens_precede_the_first_real_token_of_each_sequence(mask: torch.Tensor) -> None:
    tokens = torch.arange(mask.numel()).view(mask.shape) + 10
    where = virtual_token_layout(COUNT, len(mask), mask)
    found = where.insert(tokens, VIRTUAL).tolist()
    for row, real, got in zip(tokens.tolist(), mask.tolist(), found, strict=True):
        first = lead(real)
        assert got == [*row[:first], *VIRTUAL.tolist(), *row[first:]]


@given(masks())
def test_hidden_states_go_where_tokens_go_and_gradients_come_back(mask: torch.Tensor) -> None:
    where = virtual_token_layout(COUNT, len(mask), mask)
    hidden = torch.randn(*mask.shape, 2, requires_grad=True)
    prompts = torch.randn(COUNT, 2, requires_grad=True)
    found = where.insert(hidden, prompts)
    is_virtual = where.insert(torch.zeros(mask.shape), torch.ones(COUNT)).bool()
    assert torch.equal(found[is_virtual].view(len(mask), COUNT, 2), prompts.expand(len(mask), -1, -1))
    found.sum().backward()
    assert torch.equal(hidden.grad, torch.ones_like(hidden))
    assert torch.equal(prompts.grad, torch.full_like(prompts, len(mask)))


@given(masks())
def test_positions_count_on_from_each_rows_first_real_token(mask: torch.Tensor) -> None:
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    where = virtual_token_layout(COUNT, len(mask), mask)
    found = where.positions(counted)
    real = where.insert(mask, torch.ones(COUNT, dtype=torch.long)).bool()
    for positions, row in zip(found, real, strict=True):
        assert positions[row].tolist() == list(range(int(row.sum())))


@given(masks())
def test_labels_of_virtual_tokens_and_padding_count_nothing(mask: torch.Tensor) -> None:
    labels = torch.arange(mask.numel()).view(mask.shape)
    found = virtual_token_layout(COUNT, len(mask), mask).labels(labels, mask)
    assert found.shape == (len(mask), COUNT + mask.shape[1])
    assert found[found != IGNORED_LABEL].tolist() == labels[mask == 1].tolist()


def test_a_cache_shows_its_virtual_tokens_to_the_model_alone() -> None:
    cache = PromptedCache(SESSION, COUNT)
    assert cache.get_seq_length() == 0
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    cache.set_token_layout(virtual_token_layout(COUNT, 2, mask))
    cache.commit(2, COUNT + 3, None, None)
    assert cache.get_seq_length() == 3
    cache.is_inside = True
    assert cache.get_seq_length() == COUNT + 3
    cache.reorder_cache(torch.tensor([1, 1]))
    assert cache.token_layout is not None
    assert cache.token_layout.leads.tolist() == [0, 0]


def test_virtual_tokens_are_rolled_back_all_or_none() -> None:
    cache = PromptedCache(SESSION, COUNT)
    cache.set_token_layout(virtual_token_layout(COUNT, 1, torch.tensor([[0, 1, 1]])))
    cache.commit(1, COUNT + 3, None, None)
    cache.set_length(COUNT + 1)
    assert cache.length == COUNT + 1
    cache.set_length(COUNT)
    assert cache.length == 0
    assert cache.token_layout is None
