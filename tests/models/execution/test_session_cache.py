"""A session's cache against a reference that has none: it computes each sequence's whole history again, alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.data_structures import Span, StepLayout
from swarm.errors import WrongPosition
from swarm.models.attention.contiguous_attention import ContiguousKV
from swarm.models.attention.padded_kv import PaddedKV
from swarm.models.attention.page_pool import PagePool
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.session_cache import (
    SessionCache,
    StepComputation,
    advance_steps,
    forward_without_cache,
)
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import ExecutionStrategy
from swarm.models.flash.flash_span import FlashSpan
from swarm.models.loading.span_loading import load_span
from tests import zoo

torch.set_num_threads(1)

HIDDEN = 32
MAX_ROWS, MAX_COUNT, MAX_STEPS = 4, 5, 8
TOLERANCE = 1e-4

PAGE = 3
"""Positions of a page, so that tiny sequences have many."""

CASES = {
    ("llama", "paged"): ("paged", 60),  # grouped keys
    ("llama", "contiguous"): ("contiguous", 60),
    ("llama", "padded"): ("padded", 60),
    ("mistral", "paged"): ("paged", 40),  # a window shorter than the histories
    ("mistral", "contiguous"): ("contiguous", 20),
    ("gemma2", "paged"): ("contiguous", 20),  # windows in every second layer, soft-capped scores: not in pages
    ("gpt_oss", "contiguous"): ("contiguous", 20),  # a learned sink for each head
    ("deepseek_v3", "paged"): ("contiguous", 20),  # latents in the cache: not in pages
    ("qwen3_moe", "contiguous"): ("contiguous", 10),
    ("opt", "paged"): ("paged", 10),  # positions that are none of the span's
    ("gpt2", "padded"): ("padded", 20),
    ("falcon_alibi", "paged"): ("padded", 30),  # positions as distances: cannot be packed, so they go the slow way
}
"""Family and the layout that is asked for: the layout that it gets, and the number of examples."""

slow = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def load(family: str, factory, *, packed: bool = True, layout: str = "auto") -> SpanModel:
    checkpoint = open_checkpoint(zoo.make_checkpoint(family, factory.mktemp("checkpoint")))
    layout = layout if packed else "padded"
    return load_span(checkpoint, Span(1, 4), dtype=torch.float32, device=torch.device("cpu"), layout=layout)


def load_in_pages(family: str, factory, page: int) -> SpanModel:
    """Small pages, so that tiny sequences have many."""
    model = load(family, factory, layout="paged")
    paging = model.strategy.paging
    if paging is None:
        return model
    return model.with_strategy(ExecutionStrategy("paged", replace(paging, pool=PagePool(page))))


def load_as(layout: str, family: str, factory, page: int = 8) -> SpanModel:
    return load_in_pages(family, factory, page) if layout == "paged" else load(family, factory, layout=layout)


@pytest.fixture(scope="module", params=["paged", "contiguous", "padded"])
def llama(request, tmp_path_factory) -> SpanModel:
    model = load_as(request.param, "llama", tmp_path_factory)
    found = model.strategy
    assert (found.layout, found.packed, found.paging is not None) == (
        request.param,
        request.param != "padded",
        request.param == "paged",
    )
    return model


class Reference:
    """What a session's outputs have to be."""

    def __init__(self, model: SpanModel) -> None:
        self.model = model
        self.histories: list[torch.Tensor] = []

    def step(self, packed: torch.Tensor, layout: StepLayout) -> torch.Tensor:
        nothing = torch.empty(0, HIDDEN)
        sources = layout.sources if layout.sources is not None else range(layout.sequences)
        news = packed.split(layout.counts)
        pasts = [self.histories[source] if source < len(self.histories) else nothing for source in sources]
        self.histories = [
            torch.cat([past[:start], new]) for past, start, new in zip(pasts, layout.starts, news, strict=True)
        ]
        outputs = [
            self.model.forward(history.unsqueeze(0))[0, len(history) - count :]
            for history, count in zip(self.histories, layout.counts, strict=True)
            if count
        ]
        return torch.cat([nothing, *outputs])


class Both:
    """A session and its reference, kept in step."""

    def __init__(self, model: SpanModel) -> None:
        self.model = model
        self.cache = SessionCache(model)
        self.reference = Reference(model)
        self.offsets: tuple[int, ...] = ()
        self.random = torch.Generator().manual_seed(0)

    @property
    def lengths(self) -> list[int]:
        return [len(history) for history in self.reference.histories]

    def inputs(self, layout: StepLayout) -> torch.Tensor:
        return torch.randn(layout.tokens, HIDDEN, generator=self.random)

    def step(self, layout: StepLayout, packed: torch.Tensor | None = None) -> None:
        packed = self.inputs(layout) if packed is None else packed
        before = packed.clone()
        output = self.cache.step(packed, layout)
        expected = self.reference.step(packed, layout)
        assert torch.equal(packed, before), "the inputs belong to the caller"
        assert output.shape == expected.shape
        assert self.cache.lengths == tuple(self.lengths)
        close(output, expected)
        self.offsets = layout.offsets or (0,) * layout.sequences

    def append(self, *counts: int) -> None:
        lengths = [*self.lengths, *[0] * len(counts)]
        self.step(StepLayout(tuple(lengths[: len(counts)]), counts))


def close(output: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCE * scale)


@st.composite
def layouts(draw, lengths: Sequence[int], offsets: Sequence[int] = ()) -> StepLayout:
    """Any step that a session with sequences of these lengths may get.

    A row keeps its offset as long as it lives, as a client's padding does. Outputs then do not depend on it; they do if
    a row is computed with the offset of another one.
    """
    sources = None
    if lengths and draw(st.booleans()):
        rows = draw(st.integers(1, MAX_ROWS))
        sources = tuple(draw(st.integers(0, len(lengths) - 1)) for _ in range(rows))
        known = [lengths[source] for source in sources]
    else:
        rows = draw(st.integers(1, MAX_ROWS))
        known = [*lengths, *[0] * rows][:rows]
    together = draw(st.booleans())  # the ordinary case: nothing is rolled back
    starts = tuple(length if together else draw(st.integers(0, length)) for length in known)
    same = draw(st.none() | st.integers(1, MAX_COUNT))
    counts = tuple(same if same is not None else draw(st.integers(0, MAX_COUNT)) for _ in range(rows))
    kept = [offsets[row] if row < len(offsets) else 0 for row in (sources if sources is not None else range(rows))]
    told = tuple(offset if start else draw(st.integers(0, 9)) for offset, start in zip(kept, starts, strict=True))
    return StepLayout(starts, counts, sources, told if any(told) or draw(st.booleans()) else None)


class Session(Both):
    """A session whose steps are computed in portions, together with those of other sessions."""

    def __init__(self, model: SpanModel, seed: int) -> None:
        super().__init__(model)
        self.random.manual_seed(seed)
        self.work: StepComputation | None = None

    def begin(self, layout: StepLayout) -> None:
        self.work = self.cache.start_step(self.inputs(layout), layout)

    def finish(self) -> None:
        assert self.work is not None
        work, self.work = self.work, None
        work.commit()
        close(work.output, self.reference.step(work.inputs, work.layout))
        assert self.cache.lengths == tuple(self.lengths)
        self.offsets = work.layout.offsets or (0,) * work.layout.sequences

    def give_up(self) -> None:
        """The step failed somewhere; the client goes on from what is left."""
        self.work = None
        left = self.cache.lengths
        assert all(length <= before for length, before in zip(left, self.lengths, strict=True))
        self.reference.histories = [
            history[:length] for history, length in zip(self.reference.histories, left, strict=True)
        ]


@pytest.mark.parametrize(("family", "requested"), CASES)
def test_any_schedule_of_several_sessions_is_as_if_each_were_alone(family, requested, tmp_path_factory):
    layout, examples = CASES[family, requested]
    model = load_as(requested, family, tmp_path_factory, page=PAGE)
    assert model.strategy.layout == layout

    @given(st.data())
    @settings(slow, max_examples=examples)
    def schedule(data):
        sessions = [Session(model, seed) for seed in range(data.draw(st.integers(1, 3)))]
        for _ in range(data.draw(st.integers(1, MAX_STEPS))):
            portions = []
            for place, session in enumerate(sessions):
                if session.work is None and data.draw(st.integers(0, 9)) == 0:  # closed, and another one opened
                    sessions[place] = session = Session(model, place + 7)
                if session.work is None and data.draw(st.booleans()):
                    session.begin(data.draw(layouts(session.lengths, session.offsets)))
                elif session.work is not None and data.draw(st.integers(0, 3)) == 0:
                    session.give_up()
                if session.work is not None:
                    portions.append((session.work, data.draw(st.integers(0, session.work.tokens_left))))
            advance_steps(portions)
            for session in sessions:
                if session.work is not None and not session.work.tokens_left:
                    session.finish()
        if model.strategy.paging is not None:
            held = {
                page for one in sessions if one.work is None for row in one.cache._storage.lease.tables for page in row
            }
            assert model.strategy.paging.pool.in_use >= len(held)

    schedule()
    if model.strategy.paging is not None:
        assert model.strategy.paging.pool.in_use == 0


class Failing:
    """A method of the model that fails in its n-th call, before or after it has written to the cache."""

    def __init__(self, method: Callable[..., torch.Tensor], calls: int, late: bool) -> None:
        self.method, self.calls, self.late = method, calls, late

    def __call__(self, *args, **kwargs) -> torch.Tensor:
        self.calls -= 1
        if self.calls == 0 and not self.late:
            raise MemoryError("before")
        result = self.method(*args, **kwargs)
        if self.calls == 0:
            raise MemoryError("after")
        return result


def step_that_fails(both: Both, layout: StepLayout, calls: int, late: bool, packed: torch.Tensor) -> bool:
    name = "forward_tokens" if both.model.strategy.packed else "forward"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(both.model, name, Failing(getattr(both.model, name), calls, late))
        try:
            both.cache.step(packed, layout)
        except MemoryError:
            return True
    return False


@given(st.data())
@settings(slow, max_examples=100)
def test_a_step_that_fails_leaves_nothing_wrong_behind(llama, data):
    """It can be sent again, and if it is not, no sequence silently holds what it brought."""
    both = Both(llama)
    for _ in range(data.draw(st.integers(1, MAX_STEPS))):
        layout = data.draw(layouts(both.lengths, both.offsets))
        packed = both.inputs(layout)
        if data.draw(st.booleans()):
            before = both.lengths
            if not step_that_fails(both, layout, data.draw(st.integers(1, 2)), data.draw(st.booleans()), packed):
                both.reference.step(packed, layout)
                both.offsets = layout.offsets or ()
                continue
            # A row that was to be rolled back may have forgotten what lies behind; others are as they were.
            after = both.cache.lengths
            sources = layout.sources if layout.sources is not None else range(layout.sequences)
            for row, length in enumerate(before):
                kept = [start for source, start in zip(sources, layout.starts, strict=True) if source == row]
                assert min([length, *kept]) <= after[row] <= length
            if data.draw(st.booleans()):  # the client goes on with something else
                both.reference.histories = [
                    history[:length] for history, length in zip(both.reference.histories, after, strict=True)
                ]
                continue
        both.step(layout, packed)


def test_a_failed_step_changes_no_sequence_and_can_be_sent_again(llama):
    both = Both(llama)
    both.append(3, 5)
    layout = StepLayout((3, 5), (1, 1))
    packed = both.inputs(layout)
    for late in (False, True, True):
        assert step_that_fails(both, layout, 1, late, packed)
        assert both.cache.lengths == (3, 5)
    both.step(layout, packed)
    both.append(2, 2)


def test_a_failed_rollback_does_not_leave_the_new_tokens_in_the_old_place(llama):
    both = Both(llama)
    both.append(6)
    assert step_that_fails(both, StepLayout((2,), (3,)), 1, True, torch.randn(3, HIDDEN))
    try:
        both.append(1)
    except WrongPosition:
        both.step(StepLayout((2,), (1,)))


def test_copies_beams_and_sequences_that_come_and_go(llama):
    both = Both(llama)
    both.append(4)
    both.step(StepLayout((4, 4), (2, 1), (0, 0)))  # one rectangle must not be written to by two sequences
    both.append(1, 1)
    both = Both(llama)
    both.append(4)
    both.step(StepLayout((4, 4), (0, 1), (0, 0)))  # a copy that waits keeps its past
    both.append(1, 0)
    both.append(1, 1)
    both = Both(llama)
    both.append(5, 5)
    both.step(StepLayout((2, 5, 5), (2, 2, 0), (0, 1, 0)))  # also when the original is rolled back
    both.append(1, 1, 1)
    for sources in ((1, 0, 2), (2, 2, 0), (1, 1, 1), (0, 1, 2)):
        both.step(StepLayout(tuple(both.lengths[source] for source in sources), (1, 1, 1), sources))
    both.append(1, 1, 2, 0)
    both.append(1)  # the other rows are gone
    both.append(2, 3)
    both.step(StepLayout((1, 0), (2, 0), (1, 0)))
    assert both.cache.lengths == (3, 0)
    both.append(60, 61)  # longer than the first capacity
    both.step(StepLayout((63, 30), (70, 1)))
    both.append(1, 1)


def test_outputs_are_not_overwritten_by_later_steps(llama):
    cache = SessionCache(llama)
    first = cache.step(torch.randn(3, HIDDEN), StepLayout((0,), (3,)))
    kept = first.clone()
    cache.step(torch.randn(3, HIDDEN), StepLayout((0,), (3,)))
    assert torch.equal(first, kept)


def test_the_ordinary_case_copies_nothing(llama, monkeypatch):
    both = Both(llama)
    both.append(3, 7, 5)
    both.append(1, 1, 1)

    def copied(*args):
        raise AssertionError("rows were copied")

    monkeypatch.setattr(PaddedKV, "from_slices", copied)
    monkeypatch.setattr(ContiguousKV, "select_sequences", copied)
    monkeypatch.setattr(PagePool, "copy_pages", lambda pool, sources, targets: sources and copied())
    for _ in range(4):
        both.append(1, 1, 1)
    both.step(StepLayout(tuple(length - 2 for length in both.lengths), (3, 3, 3)))
    monkeypatch.undo()
    both.append(1, 0, 1)


def held(model: SpanModel) -> int:
    """Slots of attention cache that exist in this process, one layer's keys."""
    gc.collect()
    if model.strategy.paging is not None:
        return model.strategy.paging.pool.in_use * model.strategy.paging.pool.page_size
    if model.strategy.packed:
        keys = [
            next(iter(one.layers.values()))[0] for one in gc.get_objects() if type(one) is ContiguousKV and one.layers
        ]
    else:
        caches = [one for one in gc.get_objects() if type(one) is PaddedKV and one.sequences]
        keys = [one.layers[one.first].keys for one in caches]
    return sum(one.shape[0] * one.shape[2] for one in keys)


def test_sequences_that_stop_one_by_one_do_not_hold_the_memory_of_all(llama):
    """Each sequence is counted once, so a batch whose sequences end one by one must not take sequences² / 2."""
    rows, elsewhere = 16, held(llama)
    cache = SessionCache(llama)
    cache.step(torch.randn(rows, HIDDEN), StepLayout((0,) * rows, (1,) * rows))
    alone = held(llama) - elsewhere
    for stopped in range(1, rows):
        counts = (0,) * stopped + (1,) * (rows - stopped)
        cache.step(torch.randn(sum(counts), HIDDEN), StepLayout(cache.lengths, counts))
    assert held(llama) - elsewhere <= 2 * alone


def test_a_session_that_is_cleared_holds_nothing(llama):
    """Also where a step of it is being computed, and something still refers to the session."""
    elsewhere = held(llama)
    cache = SessionCache(llama)
    cache.step(torch.randn(5, HIDDEN), StepLayout((0, 0), (3, 2)))
    work = cache.start_step(torch.randn(2, HIDDEN), StepLayout((3, 2), (1, 1)))
    cache.clear()
    advance_steps([(work, work.tokens_left)])
    work.commit()
    del work
    assert (cache.lengths, held(llama)) == ((), elsewhere)
    both = Both(llama)
    both.append(2, 2)


@settings(slow, max_examples=25)
@given(length=st.integers(1, 30), behind=st.integers(0, 30), new=st.integers(1, 9), trims=st.booleans())
def test_a_session_begins_with_a_part_of_another(llama, length, behind, new, trims):
    """Both go on, each with its own tokens, whether or not the first one has left and only that part of it is kept."""
    first, second = Both(llama), Both(llama)
    first.append(length + behind)
    source = first.cache.shared()
    if trims:
        first.cache.clear()
        source.trim(length)
    second.cache.begin_with(source, length)
    second.reference.histories = [first.reference.histories[0][:length]]
    for _ in range(3):
        second.append(new)
        if not trims:
            first.append(new)
    second.step(StepLayout((length // 2,), (2,)))


def test_what_is_trimmed_holds_no_more_than_it_has(llama):
    elsewhere, page = held(llama), 1 if llama.strategy.paging is None else llama.strategy.paging.pool.page_size
    cache = SessionCache(llama, max_length=2000)
    cache.step(torch.randn(900, HIDDEN), StepLayout((0,), (900,)))
    cache.trim(64)
    assert held(llama) - elsewhere == -(-64 // page) * page
    for length in (0, 65):
        with pytest.raises(WrongPosition):
            SessionCache(llama).begin_with(cache, length)


def refused(cache: SessionCache, layout: StepLayout) -> None:
    before = cache.lengths
    with pytest.raises(WrongPosition):
        cache.validate_layout(layout)
    with pytest.raises(WrongPosition):
        cache.step(torch.randn(layout.tokens, HIDDEN), layout)
    assert cache.lengths == before


def test_steps_that_do_not_continue_what_is_there(llama):
    both = Both(llama)
    refused(both.cache, StepLayout((1,), (1,)))
    refused(both.cache, StepLayout((0,), (1,), (0,)))
    both.append(3, 5)
    refused(both.cache, StepLayout((4, 5), (1, 1)))
    refused(both.cache, StepLayout((3, 5, 1), (1, 1, 1)))
    refused(both.cache, StepLayout((3, 5), (1, 1), (0, 2)))
    refused(both.cache, StepLayout((3, 5), (1, 1), (1, 0)))
    both.append(1, 1)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
@settings(slow, max_examples=40)
def test_a_forward_without_a_session(llama, counts):
    packed = torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(1))
    layout = StepLayout((0,) * len(counts), tuple(counts))
    close(forward_without_cache(llama, packed, layout), Reference(llama).step(packed, layout))


def test_a_ragged_forward_computes_little_more_than_its_tokens(tmp_path_factory, monkeypatch):
    """Padding one long sequence and many short ones to a rectangle would take memory that is not accounted for."""
    llama = load("llama", tmp_path_factory, packed=False)
    slots = []
    forward = llama.forward

    def note(hidden, *args):
        slots.append(hidden.shape[0] * hidden.shape[1])
        return forward(hidden, *args)

    monkeypatch.setattr(llama, "forward", note)
    layout = StepLayout((0,) * 101, (100,) + (1,) * 100)
    forward_without_cache(llama, torch.randn(layout.tokens, HIDDEN), layout)
    assert sum(slots) <= 2 * layout.tokens


@pytest.mark.parametrize("layout", ["contiguous", "paged"])
def test_weights_on_flash_learn_which_tokens_belong_to_one_sequence(layout, tmp_path_factory):
    model = load("llama", tmp_path_factory, layout=layout)
    model.flash = FlashSpan(weight_bytes=0, blocks=())
    layouts = [StepLayout((0,), (1,)), StepLayout((0, 0), (4, 2))]
    steps = [SessionCache(model).start_step(torch.randn(sum(one.counts), HIDDEN), one) for one in layouts]
    advance_steps([(step, step.tokens_left) for step in steps])
    assert list(model.flash.shared.tokens.counts) == [1, 4, 2]
    advance_steps([(SessionCache(model).start_step(torch.randn(3, HIDDEN), StepLayout((0,), (3,))), 2)])
    assert list(model.flash.shared.tokens.counts) == [2]
