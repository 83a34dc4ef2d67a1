"""Sequences in pages: what a step does to their pages."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import StepLayout
from swarm.models.attention import page_pool
from swarm.models.attention.page_pool import PagePool
from swarm.models.execution.paged_sequences import PagedSequences, StagedPagedSequences, plan_pages
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from tests.models.execution.test_session_cache import HIDDEN, PAGE, Session, layouts, load_in_pages


class Paper:
    """Sequences whose positions hold numbers instead of keys and values, and what a step writes there."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.sequences = PagedSequences(pool)
        self.expected: list[list[int]] = []

    def read(self, table: Sequence[int], length: int) -> list[int]:
        keys = self.pool.layers[0][0]
        return [int(keys[table[position // PAGE], position % PAGE, 0, 0]) for position in range(length)]

    @torch.inference_mode()
    def write(self, draft: StagedPagedSequences, layout: StepLayout, news: Sequence[Sequence[int]]) -> None:
        for table, start, new in zip(draft.lease.tables, layout.starts, news, strict=True):
            for position, value in enumerate(new, start):
                self.pool.layers[0][0][table[position // PAGE], position % PAGE] = value

    def check(self) -> None:
        assert self.sequences.lengths == tuple(map(len, self.expected))
        for table, expected in zip(self.sequences.lease.tables, self.expected, strict=False):
            assert self.read(table, len(expected)) == expected


def pool_of_numbers() -> PagePool:
    pool = PagePool(PAGE)
    with torch.inference_mode():
        pool.layer_storage(0, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
    return pool


@given(st.data())
@settings(max_examples=300)
def test_any_steps_of_any_sessions_leave_each_sequence_what_it_was_given(data):
    """Steps that are committed, and steps that write some of their tokens and are given up then."""
    pool, number = pool_of_numbers(), 0
    sessions = [Paper(pool) for _ in range(data.draw(st.integers(1, 3)))]
    for _ in range(data.draw(st.integers(1, 12))):
        session = sessions[data.draw(st.integers(0, len(sessions) - 1))]
        before = list(map(len, session.expected))
        layout = data.draw(layouts(before))
        sources = layout.sources if layout.sources is not None else range(layout.sequences)
        news = []
        for count in layout.counts:
            news.append(list(range(number + 1, number + count + 1)))
            number += count
        pasts = [session.expected[source] if source < len(before) else [] for source in sources]
        draft = session.sequences.stage(layout, torch.zeros(layout.tokens, 1))
        if data.draw(st.booleans()):
            session.write(draft, layout, news)
            draft.commit()
            session.expected = [past[:start] + new for past, start, new in zip(pasts, layout.starts, news, strict=True)]
        else:
            session.write(draft, layout, [new[: data.draw(st.integers(0, len(new)))] for new in news])
            after = session.sequences.lengths
            for row, length in enumerate(before):
                kept = [start for source, start in zip(sources, layout.starts, strict=True) if source == row]
                assert min([length, *kept]) <= after[row] <= length
            session.expected = [row[:length] for row, length in zip(session.expected, after, strict=True)]
        del draft
        for one in sessions:
            one.check()
        held = {page for one in sessions for table in one.sequences.lease.tables for page in table}
        assert pool.in_use == len(held)
    del one, session
    sessions.clear()
    assert pool.in_use == 0


def tables_of(*lengths: int) -> tuple[tuple[int, ...], ...]:
    """Sequences that share nothing."""
    pages = iter(range(1, 100))
    return tuple(tuple(next(pages) for _ in range(-(-length // 256))) for length in lengths)


def once(page: int) -> int:
    return 1


def test_which_pages_a_step_shares_copies_and_needs():
    def plan(lengths, starts, counts, sources=None, holders=once):
        layout = StepLayout(starts, counts, sources)
        plans = plan_pages(tables_of(*lengths), lengths, layout, 256, holders)
        return [(one.kept, one.copied, one.fresh, one.overwrites) for one in plans]

    # A page more only where the last one is full.
    assert plan((300, 512), (300, 512), (1, 1)) == [((1, 2), None, 0, False), ((3, 4), None, 1, False)]
    # Copies share full pages.
    copies = [((1, 2, 3), None, 0, False), ((1, 2), 3, 1, False), ((1, 2), 3, 1, False)]
    assert plan((600,), (600,) * 3, (1,) * 3, (0,) * 3) == copies
    # A page that another sequence of the step needs is not written to, also where that sequence comes later.
    assert plan((600,), (100, 600), (1, 1), (0, 0)) == [((), 1, 1, False), ((1, 2, 3), None, 0, False)]
    # Not even by one that has copied what it needs: the step may fail and be sent again.
    assert plan((50,), (0, 50), (1, 1), (0, 0)) == [((), None, 1, False), ((1,), None, 0, False)]
    # Nor is a page that another session holds.
    assert plan((300,), (300,), (1,), holders=lambda page: 2) == [((1,), 2, 1, False)]
    # A sequence that is rolled back goes on in its own pages.
    assert plan((600,), (400,), (5,)) == [((1, 2), None, 0, True)]
    assert plan((600,), (0,), (800,)) == [((1, 2, 3), None, 1, True)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> SpanModel:
    return load_in_pages("llama", tmp_path_factory, PAGE)


def step(cache: SessionCache, *counts: int) -> None:
    starts = cache.lengths or (0,) * len(counts)
    cache.step(torch.randn(sum(counts), HIDDEN), StepLayout(starts, counts))


def test_beams_share_what_they_have_in_common(llama):
    pool, cache = llama.strategy.paging.pool, SessionCache(llama)
    step(cache, 10 * PAGE + 1)
    assert pool.in_use == 11
    cache.step(torch.randn(4, HIDDEN), StepLayout((10 * PAGE + 1,) * 4, (1,) * 4, (0,) * 4))
    assert pool.in_use == 10 + 4
    cache.step(torch.randn(4, HIDDEN), StepLayout((10 * PAGE + 2,) * 4, (1,) * 4, (2, 2, 1, 2)))
    assert pool.in_use == 10 + 4


def test_what_a_session_holds_ends_with_it(llama):
    pool = llama.strategy.paging.pool
    cache = SessionCache(llama)
    step(cache, 7, 4)
    assert pool.in_use == 3 + 2
    work = cache.start_step(torch.randn(2, HIDDEN), StepLayout((7, 4), (1, 1)))
    del cache  # closed while its step is being computed
    assert pool.in_use == 3 + 2
    advance_steps([(work, 2)])
    work.commit()
    del work
    assert pool.in_use == 0


def test_sequences_that_are_left_out_give_their_pages_back(llama):
    pool, cache = llama.strategy.paging.pool, SessionCache(llama)
    step(cache, 7, 7)
    cache.step(torch.randn(1, HIDDEN), StepLayout((7,), (1,)))
    assert pool.in_use == 3
    cache.step(torch.randn(1, HIDDEN), StepLayout((0,), (1,)))
    assert pool.in_use == 1


def test_parts_of_a_span_share_the_pool_of_the_whole(llama):
    """One token has room in all blocks, as the accountant counts, whichever blocks a session uses."""
    part = llama.narrowed(type(llama.span)(2, 4))
    assert part.strategy.paging is llama.strategy.paging
    whole, cache = SessionCache(llama), SessionCache(part)
    step(whole, 4)
    step(cache, 5)
    assert llama.strategy.paging.pool.in_use == 2 + 2


def test_memory_that_ends_leaves_the_session_as_it_was(llama, monkeypatch):
    """The step that needs more fails alone; it can be sent again when there is memory."""
    pair = Session(llama, 0)
    pair.begin(StepLayout((0, 0), (5, 4)))
    advance_steps([(pair.work, 9)])
    pair.finish()
    in_use, room = llama.strategy.paging.pool.in_use, llama.strategy.paging.pool.page_count * PAGE

    def no_memory(*args):
        raise torch.OutOfMemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(page_pool, "_grown", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            pair.begin(StepLayout((5, 2), (room, 1)))
    assert pair.cache.lengths == (5, 4)
    assert llama.strategy.paging.pool.in_use == in_use
    pair.begin(StepLayout((5, 2), (room, 1)))
    advance_steps([(pair.work, pair.work.tokens_left)])
    pair.finish()


def test_infinities_of_one_session_do_not_reach_the_next(llama):
    cache = SessionCache(llama)
    cache.step(torch.full((9, HIDDEN), float("nan")), StepLayout((0,), (9,)))
    del cache
    pair = Session(llama, 1)
    pair.begin(StepLayout((0, 0), (4, 1)))
    advance_steps([(pair.work, 5)])
    pair.finish()
