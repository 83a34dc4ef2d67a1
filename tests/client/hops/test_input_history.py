"""The record of a hop's inputs, against a model of what a server keeps of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.client.hops import input_history as record
from swarm.client.hops.input_history import InputHistory, Step
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import Span, StepLayout, WireFormat
from swarm.models.execution.session_cache import SessionCache
from swarm.protocol.compression import decode_tensor, encode_tensor
from swarm.server.limits import MIN_REQUEST_TOKENS

HIDDEN, MAX_ROWS, MAX_COUNT = 2, 4, 5
CPU = torch.device("cpu")
Value = tuple[float, ...]


class Cache:
    """A server's cache: for each row, what went in at each position, and with which offset."""

    def __init__(self) -> None:
        self.rows: list[list[tuple[Value, int]]] = []

    def step(self, layout: StepLayout, hidden: PackedHidden) -> None:
        values = [tuple(row) for row in decoded(hidden).tolist()]
        assert len(values) == layout.tokens
        sources = layout.sources if layout.sources is not None else range(layout.sequences)
        offsets = layout.offsets if layout.offsets is not None else [0] * layout.sequences
        pasts = [self.rows[source] if source < len(self.rows) else [] for source in sources]
        assert all(start <= len(past) for past, start in zip(pasts, layout.starts, strict=True))
        bounds = itertools.accumulate(layout.counts, initial=0)
        self.rows = [
            past[:start] + [(value, offset) for value in values[first:last]]
            for past, start, offset, (first, last) in zip(
                pasts, layout.starts, offsets, itertools.pairwise(bounds), strict=True
            )
        ]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]


def decoded(hidden: PackedHidden) -> torch.Tensor:
    return decode_tensor(hidden.payload, hidden.tokens, hidden.hidden_size, hidden.wire, hidden.dtype, CPU).float()


def encoded(layout: StepLayout, first: int, wire: WireFormat = WireFormat.NONE, dtype: str = "float32") -> PackedHidden:
    """Distinct values: `first`, and so on."""
    values = torch.arange(first, first + layout.tokens * HIDDEN, dtype=getattr(torch, dtype)).view(-1, HIDDEN)
    return PackedHidden(bytes(encode_tensor(values, wire)), layout.tokens, HIDDEN, wire, dtype)


@st.composite
def layouts(draw: st.DrawFn, lengths: Sequence[int]) -> StepLayout:
    """Any step that a session with rows of these lengths may make."""
    sources = None
    rows = draw(st.integers(1, MAX_ROWS))
    if lengths and draw(st.booleans()):
        sources = tuple(draw(st.integers(0, len(lengths) - 1)) for _ in range(rows))
        known = [lengths[source] for source in sources]
    else:
        known = [*lengths, *[0] * rows][:rows]
    together = draw(st.booleans())
    starts = tuple(length if together else draw(st.integers(0, length)) for length in known)
    counts = tuple(draw(st.integers(0, MAX_COUNT)) for _ in range(rows))
    if not any(counts):
        counts = (1,) * rows
    offsets = draw(st.none() | st.tuples(*[st.integers(0, 2)] * rows))
    return StepLayout(starts, counts, sources, offsets)


def replayed(kept: InputHistory, done: int, most: int) -> Cache:
    """An empty cache after a replay, whose requests are looked at."""
    cache = Cache()
    ends: tuple[int, ...] | None = None
    for layout, hidden in kept.replay(done):
        assert layout.sources is None
        assert 0 < layout.tokens == hidden.tokens
        assert layout.tokens <= max(most, layout.sequences)  # a request has one token a row at least
        assert layout.starts == (ends or (0,) * layout.sequences)
        cache.step(layout, hidden)
        ends = tuple(start + count for start, count in zip(layout.starts, layout.counts, strict=True))
    return cache


def assert_same(cache: Cache, expected: Cache) -> None:
    if any(expected.rows):
        assert cache.rows == expected.rows
    else:
        assert cache.rows == []


@given(st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_a_replay_fills_a_cache_as_the_steps_did(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 12))
    patch = pytest.MonkeyPatch()
    with patch.context() as limits:
        limits.setattr(record, "MAX_REPLAY_TOKENS", most)
        limits.setattr(record, "MAX_UNFOLDED_STEPS", data.draw(st.integers(1, 5)))
        limits.setattr(record, "MAX_UNFOLDED_TOKENS", data.draw(st.integers(1, 20)))
        kept, cache = InputHistory(), Cache()
        finished = -1
        for number in range(data.draw(st.integers(1, 12))):
            layout = data.draw(layouts(cache.lengths))
            wire = data.draw(st.sampled_from([WireFormat.NONE, WireFormat.FLOAT16]))
            dtype = data.draw(st.sampled_from(["float32", "bfloat16"]))
            hidden = encoded(layout, number, wire, dtype)
            kept.add(Step(number, layout, hidden))
            if data.draw(st.integers(0, 4)) == 0:
                kept.drop_after(number - 1)
                continue
            kept.add(Step(number, layout, encoded(layout, 1000)))  # heard again: what it was handed counts
            assert kept.get(number).hidden is hidden
            cache.step(layout, hidden)
            finished = number
            what = data.draw(st.sampled_from(["nothing", "fold", "tidy", "replay"]))
            if what == "fold":
                kept.fold(data.draw(st.integers(-1, finished)))
            elif what == "tidy":
                kept.fold_if_long(data.draw(st.integers(-1, finished)))
            elif what == "replay":
                assert_same(replayed(kept, finished, most), cache)
        assert kept.last <= number
        assert_same(replayed(kept, finished, most), cache)
        assert_same(replayed(kept, finished, most), cache)  # and again


@given(st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_only_the_steps_that_are_wanted_are_replayed(data: st.DataObject) -> None:
    kept, cache = InputHistory(), Cache()
    states = []
    for number in range(6):
        layout = data.draw(layouts(cache.lengths))
        hidden = encoded(layout, number)
        kept.add(Step(number, layout, hidden))
        cache.step(layout, hidden)
        states.append(list(cache.rows))
    first, second = sorted(data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5))))
    for done in (first, second):
        before = Cache()
        before.rows = states[done]
        assert_same(replayed(kept, done, 100), before)
    for number in range(second + 1, 6):
        assert kept.get(number).number == number


@given(st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_the_record_of_a_server_that_was_filled_by_a_replay(data: st.DataObject) -> None:
    """What comes out of one server's replay is the record of the next; later steps follow."""
    with pytest.MonkeyPatch().context() as limits:
        limits.setattr(record, "MAX_REPLAY_TOKENS", data.draw(st.integers(1, 12)))
        kept, following, cache = InputHistory(), InputHistory(), Cache()
        for number in range(data.draw(st.integers(1, 5))):
            layout = data.draw(layouts(cache.lengths))
            kept.add(Step(number, layout, encoded(layout, number)))
            cache.step(layout, encoded(layout, number))
        for layout, hidden in kept.replay(number):
            following.add_replayed(layout, hidden, number)
        assert following.last == number or not any(cache.rows)
        following.add(Step(number, layout, encoded(layout, 77)))  # in the replay already
        layout = data.draw(layouts(cache.lengths))
        following.add(Step(number + 1, layout, encoded(layout, 99)))
        cache.step(layout, encoded(layout, 99))
        assert_same(replayed(following, number + 1, 100), cache)


def test_a_long_text_is_replayed_in_pieces_that_every_server_has_memory_for() -> None:
    kept = InputHistory()
    layout = StepLayout((0, 0), (2000, 500))
    kept.add(Step(0, layout, encoded(layout, 0)))
    pieces = [piece.tokens for piece, _ in kept.replay(0)]
    assert sum(pieces) == 2500
    assert max(pieces) <= MIN_REQUEST_TOKENS


def test_nothing_is_replayed_of_nothing() -> None:
    assert list(InputHistory().replay(5)) == []


def test_a_long_record_is_folded_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_UNFOLDED_STEPS", 10)
    kept = InputHistory()
    for number in range(100):
        layout = StepLayout((number,), (1,))
        kept.add(Step(number, layout, encoded(layout, number)))
        kept.fold_if_long(number)
        assert len(kept._steps) < 10
    assert [layout.counts for layout, _ in kept.replay(99)] == [(100,)]


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_a_real_cache_goes_on_as_if_it_had_seen_the_steps(span_model: Any, data: st.DataObject) -> None:
    model = span_model.narrowed(Span(1, 3))
    size = model.hidden_size
    random = torch.Generator().manual_seed(0)

    def inputs(layout: StepLayout) -> torch.Tensor:
        return torch.randn(layout.tokens, size, generator=random)

    with pytest.MonkeyPatch().context() as limits:
        limits.setattr(record, "MAX_REPLAY_TOKENS", data.draw(st.integers(1, 12)))
        kept, original, replacement = InputHistory(), SessionCache(model), SessionCache(model)
        for number in range(data.draw(st.integers(1, 5))):
            layout = data.draw(layouts(original.lengths))
            hidden = inputs(layout)
            original.step(hidden, layout)
            packed = PackedHidden(
                encode_tensor(hidden, WireFormat.NONE), layout.tokens, size, WireFormat.NONE, "float32"
            )
            kept.add(Step(number, layout, packed))
        for layout, packed in kept.replay(number):
            hidden = decode_tensor(packed.payload, packed.tokens, size, packed.wire, packed.dtype, CPU)
            replacement.step(hidden, layout)
        if any(original.lengths):
            assert replacement.lengths == original.lengths
        layout = data.draw(layouts(original.lengths if any(original.lengths) else []))
        hidden = inputs(layout)
        expected = original.step(hidden, layout)
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(replacement.step(hidden, layout), expected, rtol=0, atol=1e-4 * scale)


def test_tokens_are_counted_whether_they_are_folded_or_not():
    history = InputHistory()
    for number in (0, 1, 4):
        layout = StepLayout((number,), (2,))
        history.add(Step(number, layout, encoded(layout, number)))
    assert history.tokens == 6
    history.drop_after(3)
    history.fold(1)
    assert history.tokens == 3  # the second step began behind the first token of the first one
