"""Recorded decode steps, with a recorder that calls the function again instead of a GPU: all but CUDA's own part."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import StepLayout
from swarm.models.attention.page_pool import PagePool
from swarm.models.execution.cuda_graphs import BATCH_SIZES, TABLE_WIDTHS, GraphRecorder
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import ExecutionStrategy
from swarm.models.execution.strategy_choice import choose_forward
from tests.models.execution.test_session_cache import HIDDEN, close, load_in_pages, slow

PAGE = 3


class Again:
    """Calls what it was given again, and counts.

    Attributes:
        made, replayed: how many functions it was given, and how often they were called later.
    """

    def __init__(self) -> None:
        self.made = self.replayed = 0

    def __call__(self, function):
        self.made += 1
        function()  # as the warm-up does

        def replay() -> None:
            self.replayed += 1
            function()

        return replay


@pytest.fixture
def recorder() -> Again:
    return Again()


def recorded(model: SpanModel, recorder: GraphRecorder) -> SpanModel:
    return model.with_strategy(replace(model.strategy, graph_recorder=recorder))


@pytest.fixture
def model(recorder, tmp_path_factory) -> SpanModel:
    return recorded(load_in_pages("mistral", tmp_path_factory, PAGE), recorder)


def plainly(model: SpanModel, session: SessionCache, hidden: torch.Tensor, layout: StepLayout) -> torch.Tensor:
    """A step of a session that has no recordings from now on."""
    session.model = model.with_strategy(replace(model.strategy, graph_recorder=None))
    return session.step(hidden, layout)


def test_any_decode_steps_are_as_without_recordings(model, recorder):
    @given(
        st.lists(st.lists(st.integers(1, 13), min_size=1, max_size=4), min_size=1, max_size=3),
        st.lists(st.integers(1, 4), min_size=1, max_size=6),
        st.booleans(),
    )
    @settings(slow, max_examples=30)
    def sessions_together(prompts, steps, move):
        noise = torch.Generator().manual_seed(0)
        sessions = [(SessionCache(model), SessionCache(model)) for _ in prompts]
        for (one, other), counts in zip(sessions, prompts, strict=True):
            hidden, layout = torch.randn(sum(counts), HIDDEN, generator=noise), StepLayout((0,) * len(counts), counts)
            close(one.step(hidden, layout), plainly(model, other, hidden, layout))
        for number, counts in enumerate(steps):
            if move and number == 1:
                model.strategy.paging.pool.reserve((model.strategy.paging.pool.page_count + 5) * PAGE)
            works = []
            for one, _ in sessions:
                rows = len(one.lengths)
                news = tuple(1 if row < counts else 0 for row in range(rows))
                hidden = torch.randn(sum(news), HIDDEN, generator=noise)
                works.append(one.start_step(hidden, StepLayout(one.lengths, news)))
            before = recorder.replayed
            advance_steps([(work, work.tokens_left) for work in works])
            assert recorder.replayed == before + 1
            for work, (_, other) in zip(works, sessions, strict=True):
                work.commit()
                close(work.output, plainly(model, other, work.inputs, work.layout))

    sessions_together()
    assert model.strategy.paging.pool.in_use == 0
    assert model.graphs.works


def decode(model: SpanModel, rows: int, length: int, steps: int = 1) -> SessionCache:
    cache = SessionCache(model)
    cache.step(torch.randn(rows * length, HIDDEN), StepLayout((0,) * rows, (length,) * rows))
    for _ in range(steps):
        cache.step(torch.randn(rows, HIDDEN), StepLayout(cache.lengths, (1,) * rows))
    return cache


def test_batches_of_like_size_share_a_recording(model, recorder):
    model.strategy.paging.pool.reserve(200 * PAGE)
    for rows in (3, 4, 3, 4):
        decode(model, rows, 2, steps=3)
    assert (recorder.made, recorder.replayed) == (1, 12)
    decode(model, 2, 2)
    assert recorder.made == 2
    decode(model, 2, TABLE_WIDTHS[0] * PAGE - 1)  # the last one that is no wider
    assert recorder.made == 2
    decode(model, 2, TABLE_WIDTHS[0] * PAGE)
    assert recorder.made == 3


def test_a_batch_that_is_too_large_or_has_longer_steps_is_not_replayed(model, recorder):
    cache = decode(model, 1, 3)
    made, replayed = recorder.made, recorder.replayed
    cache.step(torch.randn(2, HIDDEN), StepLayout((4,), (2,)))  # candidates of speculation
    decode(model, BATCH_SIZES[-1] + 1, 1)
    decode(model, 1, TABLE_WIDTHS[-1] * PAGE)
    works = [
        cache.start_step(torch.randn(1, HIDDEN), StepLayout((6,), (1,))),
        SessionCache(model).start_step(torch.randn(5, HIDDEN), StepLayout((0,), (5,))),
    ]
    advance_steps([(work, work.tokens_left) for work in works])
    assert (recorder.made, recorder.replayed) == (made, replayed)


def test_a_pool_that_moved_is_recorded_again(model, recorder):
    """The old recordings would write to where it was."""
    cache = decode(model, 2, 2)
    made, moves = recorder.made, model.strategy.paging.pool.relocations
    model.strategy.paging.pool.reserve(1000 * PAGE)
    assert model.strategy.paging.pool.relocations > moves
    old = [(id(keys), keys.clone()) for keys, _ in model.strategy.paging.pool.layers.values()]
    cache.step(torch.randn(2, HIDDEN), StepLayout((3, 3), (1, 1)))
    assert recorder.made == made + 1
    for (_, before), (keys, _) in zip(old, model.strategy.paging.pool.layers.values(), strict=True):
        assert not torch.equal(before, keys), "the new token went elsewhere"


def test_recording_writes_to_no_sequence(model):
    """The warm-up and the sequences that fill up a batch write to the scratch page."""
    cache = decode(model, 5, 4, steps=0)
    held = [page for table in cache._storage.lease.tables for page in table]
    before = [keys[held].clone() for keys, _ in model.strategy.paging.pool.layers.values()]
    with torch.inference_mode():
        model.graphs._recording(8, 4)
    assert model.graphs._recordings
    for keys, (now, _) in zip(before, model.strategy.paging.pool.layers.values(), strict=True):
        assert torch.equal(keys, now[held])


def test_a_recording_keeps_what_its_graph_reads(tmp_path_factory):
    """A graph knows addresses only, and does not keep the function that it was recorded from."""
    read = []

    def records(function):
        cells = [cell.cell_contents for cell in function.__closure__]
        read.extend(weakref.ref(one) for one in cells if isinstance(one, torch.Tensor))
        function()
        return lambda: None

    model = recorded(load_in_pages("llama", tmp_path_factory, PAGE), records)
    decode(model, 2, 2)
    gc.collect()
    assert len(read) >= 3
    assert all(one() is not None for one in read)


def test_outputs_are_not_overwritten_by_the_next_replay(model):
    cache = decode(model, 2, 2)
    first = cache.step(torch.randn(2, HIDDEN), StepLayout((3, 3), (1, 1)))
    kept = first.clone()
    cache.step(torch.randn(2, HIDDEN), StepLayout((4, 4), (1, 1)))
    assert torch.equal(first, kept)


def test_if_recording_fails_nothing_is_replayed(tmp_path_factory, caplog):
    model = load_in_pages("llama", tmp_path_factory, PAGE)
    calls = []

    def fails(function):
        calls.append(function)
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    model = recorded(model, fails)
    one, other = SessionCache(model), SessionCache(model)
    with caplog.at_level(logging.WARNING):
        for counts in ((4, 2), (1, 1), (1, 1), (0, 1)):
            hidden, layout = torch.randn(sum(counts), HIDDEN), StepLayout(one.lengths or (0, 0), counts)
            close(one.step(hidden, layout), plainly(model, other, hidden, layout))
    assert len(calls) == 1
    assert [record.message for record in caplog.records if "CUDA graphs" in record.message] == [
        "Decode steps are not recorded as CUDA graphs: operation not permitted when stream is capturing"
    ]
    assert not model.graphs.works


def test_a_replay_that_fails_harms_no_session(model, recorder):
    one, other = decode(model, 2, 3), None
    recording = next(iter(model.graphs._recordings.values()))
    key = next(iter(model.graphs._recordings))

    def fails() -> None:
        raise RuntimeError("an illegal memory access")

    model.graphs._recordings[key] = replace(recording, replay=fails)
    with pytest.raises(RuntimeError):
        one.step(torch.randn(2, HIDDEN), StepLayout((4, 4), (1, 1)))
    assert one.lengths == (4, 4)
    model.graphs._recordings[key] = recording
    one.step(torch.randn(2, HIDDEN), StepLayout((4, 4), (1, 1)))
    assert one.lengths == (5, 5)
    del one, other
    assert model.strategy.paging.pool.in_use == 0


def test_recordings_are_kept_if_they_are_right(tmp_path_factory):
    model = load_in_pages("llama", tmp_path_factory, PAGE)
    recorder = Again()
    chosen = choose_forward(model, recorder)
    assert chosen.strategy == replace(model.strategy, graph_recorder=recorder)
    assert chosen.graphs.works
    assert recorder.replayed
    computes_nothing = lambda function: lambda: None  # noqa: E731
    assert choose_forward(model, computes_nothing).strategy == model.strategy

    def fails(function):
        raise RuntimeError("no")

    def fails_unexpectedly(function):
        raise TypeError("no")

    assert choose_forward(model, fails).strategy == choose_forward(model, fails_unexpectedly).strategy == model.strategy
    contiguous = model.with_strategy(ExecutionStrategy("contiguous"))
    assert choose_forward(contiguous, Again()).graphs is None
    assert choose_forward(model).graphs is None  # without a GPU or a recorder


def test_what_is_recorded_as_a_constant_is_found_out(tmp_path_factory, monkeypatch):
    """A recording repeats what it did the first time. A family that reads a position in Python would be wrong."""
    model = load_in_pages("llama", tmp_path_factory, PAGE)
    run = SpanModel.run_modules

    def at_the_beginning(self, batch, hidden, positions):
        return run(self, batch, hidden, positions * 0)

    def with_constants(function):
        def replay() -> None:
            replayed.append(function)
            with monkeypatch.context() as patch:
                patch.setattr(SpanModel, "run_modules", at_the_beginning)
                function()

        return replay

    replayed = []
    found = choose_forward(model, with_constants)
    assert replayed
    assert found.strategy.graph_recorder is None
    assert found.graphs is None


def test_a_pool_of_a_fresh_model_is_recorded(recorder, tmp_path_factory):
    """No layer has written yet when the first step is a decode step, so the recording's own run makes them."""
    model = load_in_pages("llama", tmp_path_factory, PAGE)
    model = recorded(model, recorder)
    assert isinstance(model.strategy.paging.pool, PagePool)
    assert not model.strategy.paging.pool.layers
    one, other = SessionCache(model), SessionCache(model)
    hidden = torch.randn(2, HIDDEN)
    close(one.step(hidden, StepLayout((0, 0), (1, 1))), plainly(model, other, hidden, StepLayout((0, 0), (1, 1))))
    assert recorder.replayed == 1
