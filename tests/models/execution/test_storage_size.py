"""How many slots for keys and values exist, against what was said or reserved before."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.data_structures import StepLayout
from swarm.models.attention.page_pool import PagePool
from swarm.models.execution import paged_sequences
from swarm.models.execution.session_cache import ForwardCache, SessionCache, advance_steps, forward_slots
from swarm.models.execution.span_model import SpanModel
from tests.models.execution.storage_slots import CONTIGUOUS, PADDED, Slots, count_storage
from tests.models.execution.test_session_cache import (
    HIDDEN,
    MAX_COUNT,
    MAX_STEPS,
    Reference,
    close,
    layouts,
    load_as,
    slow,
)


@pytest.fixture(autouse=True)
def _quick_collections():
    """What exists already need not be looked through in each `gc.collect()` of a test."""
    gc.freeze()
    yield
    gc.unfreeze()


class PageSlots:
    """What `Slots` counts, for a pool of pages."""

    def __init__(self, pool: PagePool) -> None:
        self.pool, self.peak = pool, 0

    def begin(self) -> None:
        self.peak = 0

    def note(self) -> None:
        self.peak = max(self.peak, self.pool.in_use)

    @property
    def most(self) -> int:
        return self.peak * self.pool.page_size


def count_slots(model: SpanModel, monkeypatch: pytest.MonkeyPatch) -> Slots | PageSlots:
    """Count all storage that is made from now on."""
    if model.strategy.paging is not None:
        pages = PageSlots(model.strategy.paging.pool)
        allocate = pages.pool.allocate

        def noted(count: int) -> list[int]:
            taken = allocate(count)
            pages.note()
            return taken

        monkeypatch.setattr(pages.pool, "allocate", noted)
        return pages
    return count_storage(model.span.length, CONTIGUOUS + PADDED, monkeypatch)


@pytest.mark.parametrize("layout", ["contiguous", "padded", "paged"])
def test_forwards_in_portions_take_no_more_than_they_say(layout, tmp_path_factory, monkeypatch):
    """What they say is charged before they begin."""
    model = load_as(layout, "llama", tmp_path_factory, page=4)
    monkeypatch.setattr(paged_sequences, "MAX_FORWARD_PAGES", 3)
    reference = load_as("padded", "llama", tmp_path_factory, page=4)
    slots = count_slots(model, monkeypatch)

    @example([2, 3, 1, 12, 1, 3], 5)  # rectangles that end far below the longest sequence
    @example([1, 1, 1, 1, 1, 1, 1, 13], 9)
    @given(st.lists(st.integers(0, 13), min_size=1, max_size=8).filter(any), st.integers(1, 9))
    @settings(slow, max_examples=40)
    def forwards(counts, portion):
        gc.collect()
        packed = torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(1))
        step = ForwardCache(model, StepLayout((0,) * len(counts), tuple(counts))).start_step(
            packed, StepLayout((0,) * len(counts), tuple(counts))
        )
        slots.begin()
        while step.tokens_left:
            advance_steps([(step, min(portion, step.tokens_left))])
        step.commit()
        assert slots.most <= forward_slots(model.strategy, counts)
        close(step.output, Reference(reference).step(packed, step.layout))

    forwards()
    if model.strategy.paging is not None:
        gc.collect()
        assert model.strategy.paging.pool.in_use == 0


@pytest.mark.parametrize("layout", ["contiguous", "padded"])
def test_sessions_take_no_more_than_they_have_reserved(layout, tmp_path_factory, monkeypatch):
    """Rows times the longest that they may get, and for as long as a step copies them, as much again."""
    model = load_as(layout, "llama", tmp_path_factory, page=4)
    slots = count_slots(model, monkeypatch)

    @given(st.data(), st.integers(MAX_COUNT, 2 * MAX_COUNT))
    @settings(slow, max_examples=40)
    def steps(data, max_length):
        gc.collect()
        slots.begin()
        cache, rows = SessionCache(model, max_length=max_length), 0
        for _ in range(data.draw(st.integers(1, MAX_STEPS))):
            layout = data.draw(layouts(cache.lengths))
            if any(start + count > max_length for start, count in zip(layout.starts, layout.counts, strict=True)):
                continue
            rows = max(rows, layout.sequences)
            cache.step(torch.randn(layout.tokens, HIDDEN), layout)
            assert slots.most <= 3 * rows * max_length
            slots.begin()
            assert slots.most <= rows * max_length

    steps()
