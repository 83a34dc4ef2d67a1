"""Steps of parts of a span, some of whose tokens leave early, against a reference that passes them block by block,
alone, by the family's own attention: a block that a token skips gets the same input as the one where the token left,
and its output is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import ExitBatchRule, ExitConfidence, ExitThresholds, Span, StepLayout
from swarm.models.execution import span_pass
from swarm.models.execution.session_cache import SessionCache, StepComputation, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits, compute_parts, fill_parts, pass_pieces
from swarm.models.execution.strategy import PADDED
from swarm.models.execution.strategy_choice import choose_exit_forwards
from swarm.models.execution.traced_fill import traced_fill
from swarm.models.exits.confidence import state_similarity
from swarm.models.exits.span_exits import SpanExits
from tests.models.execution.test_session_cache import HIDDEN, close, load, load_as, slow
from tests.models.execution.test_traced_forward import flat_of

FAMILIES = ("llama", "gpt2", "deepseek_v3", "qwen3_moe")
THRESHOLDS = (0.0, 0.9, 0.97, 1.0)
BLOCKS = (2, 3, 4)
"""Exits of a span of the blocks 1:4."""

PARTS = [Span(start, end) for start in range(1, 4) for end in range(start + 1, 5)]
"""Of that span."""


class Reference:
    """The sequences of one session, computed block by block over the padded layout."""

    def __init__(self, model: SpanModel) -> None:
        padded = model.with_strategy(PADDED)
        self.span = model.span
        self.caches = [SessionCache(padded.narrowed(Span(b, b + 1))) for b in range(*self.bounds)]

    @property
    def bounds(self) -> tuple[int, int]:
        return self.span.start, self.span.end

    def step(
        self, hidden_NH: torch.Tensor, layout: StepLayout, exits: StepExits | None
    ) -> tuple[torch.Tensor, list[int]]:
        """Outputs, and where the tokens have left, as far as the exits of the model matter."""
        left = list(exits.left) if exits is not None else [0] * layout.sequences
        sequence = [number for number, count in enumerate(layout.counts) for _ in range(count)]
        terms = exits.terms if exits is not None else None
        thresholds = dict(terms.thresholds) if terms is not None else {}
        sure: set[int] = set()
        for block, cache in zip(range(*self.bounds), self.caches, strict=True):
            output_NH = cache.step(hidden_NH, layout)
            stays = torch.tensor([not left[number] for number in sequence])
            before_NH, hidden_NH = hidden_NH, torch.where(stays.unsqueeze(1), output_NH, hidden_NH)
            if terms is None or block + 1 not in thresholds or block + 1 not in BLOCKS:
                continue
            similarity_N = state_similarity(before_NH, hidden_NH)
            now = {n for n, one in zip(sequence, similarity_N, strict=True) if one > thresholds[block + 1]}
            waiting = [number for number in sequence if not left[number]]
            sure |= now & set(waiting)
            if terms.batch == "row" or sure.issuperset(waiting):
                for number in waiting if terms.batch == "all" else now & set(waiting):
                    left[number] = block + 1
        return hidden_NH, left


@dataclass
class Pair:
    """A session and its reference."""

    model: SpanModel
    seed: int

    def __post_init__(self) -> None:
        self.cache, self.reference = SessionCache(self.model), Reference(self.model)
        self.random = torch.Generator().manual_seed(self.seed)
        self.expected: tuple[torch.Tensor, list[int]] = torch.empty(0), []

    def start(self, layout: StepLayout, exits: StepExits | None = None) -> StepComputation:
        hidden = torch.randn(layout.tokens, HIDDEN, generator=self.random)
        self.expected = self.reference.step(hidden, layout, exits)
        return self.cache.start_step(hidden, layout, exits)

    def finish(self, step: StepComputation) -> None:
        step.commit()
        close(step.output, self.expected[0])
        if step.exits is not None:
            assert list(step.exits.left) == self.expected[1]


def with_exits(model: SpanModel) -> SpanModel:
    return model.with_exits(SpanExits(BLOCKS))


def draw_exits(data: st.DataObject, counts: Sequence[int]) -> StepExits | None:
    if data.draw(st.booleans()):
        return None
    thresholds = data.draw(st.dictionaries(st.integers(1, 6), st.sampled_from(THRESHOLDS), min_size=1))
    rule: ExitBatchRule = data.draw(st.sampled_from(("row", "all")))
    terms = ExitThresholds("similarity", tuple(sorted(thresholds.items())), rule) if data.draw(st.booleans()) else None
    left = tuple(data.draw(st.sampled_from((0, 0, 1))) if count else 0 for count in counts)
    return StepExits(terms, left)


def decode_steps(model: SpanModel, data: st.DataObject, sessions: int, steps: int) -> None:
    """Prompts of some sessions, then single tokens of all of them at once, some of which leave; and rollbacks.

    If the model joins parts, each session uses any part of the span.
    """
    parts = st.sampled_from(PARTS if model.joins_parts else [model.span])
    pairs = [Pair(model.narrowed(data.draw(parts)), seed) for seed in range(sessions)]
    for step in range(steps):
        works = []
        for pair in pairs:
            if step == 0:
                counts = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
                works.append((pair, pair.start(StepLayout((0,) * len(counts), counts))))
                continue
            lengths = pair.cache.lengths
            starts = tuple(data.draw(st.integers(max(0, length - 2), length)) for length in lengths)
            counts = tuple(data.draw(st.integers(0, 1)) for _ in lengths)
            counts = counts if any(counts) else (1,) * len(counts)
            sources = None
            if data.draw(st.integers(0, 4)) == 0:
                sources = tuple(data.draw(st.integers(0, len(lengths) - 1)) for _ in lengths)
                starts = tuple(min(start, lengths[source]) for start, source in zip(starts, sources, strict=True))
            works.append((pair, pair.start(StepLayout(starts, counts, sources), draw_exits(data, counts))))
        advance_steps([(work, work.tokens_left) for _, work in works])
        for pair, work in works:
            pair.finish(work)


def check_decode_steps(model: SpanModel, examples: int) -> None:
    """Try random sessions of random lengths."""

    @given(st.data(), st.integers(1, 3), st.integers(2, 6))
    @settings(slow, max_examples=examples)
    def check(data, sessions, steps):
        decode_steps(model, data, sessions, steps)

    check()


@pytest.mark.parametrize("family", FAMILIES)
def test_any_tokens_of_any_sessions_leave(family, tmp_path_factory):
    model = with_exits(load(family, tmp_path_factory))
    assert model.can_fill

    check_decode_steps(model, examples=25)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_a_flat_forward_of_any_parts_whose_tokens_leave(family, tmp_path_factory):
    model = load(family, tmp_path_factory)
    model = with_exits(flat_of(model))
    assert model.narrowed(Span(2, 4)).strategy.flat is not None

    check_decode_steps(model, examples=25)


SPANS = st.builds(lambda start, length: Span(start, start + length), st.integers(0, 12), st.integers(1, 8))


@given(st.lists(SPANS, min_size=1, max_size=6), st.sets(st.integers(1, 20)), st.booleans())
def test_where_a_pass_is_cut(spans, exits, leaving):
    """Each step finds just its blocks in some of the pieces, one after the other. There are no other cuts."""
    pieces = pass_pieces(spans, SpanExits(tuple(sorted(exits))) if leaving else None)
    assert pieces == sorted(pieces, key=lambda one: one.start)
    for span in spans:
        own = [one for one in pieces if one.start < span.end and span.start < one.end]
        assert (own[0].start, own[-1].end) == (span.start, span.end)
        assert all(one.end == other.start for one, other in pairwise(own))
    assert all(any(one.start in span for span in spans) for one in pieces)
    bounds = {bound for span in spans for bound in (span.start, span.end)}
    looked_at = {near for block in exits for near in (block - 1, block)} if leaving else set()
    assert all(one.start in bounds | looked_at for one in pieces)
    for span in spans:
        inside = {near for near in looked_at if span.start < near < span.end}
        assert inside <= {one.start for one in pieces} or not leaving


def test_steps_of_different_parts_share_a_pass(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    computed = []

    def watched(piece, parts):
        computed.append((piece.span, len(parts)))
        return compute_parts(piece, parts)

    monkeypatch.setattr(span_pass, "compute_parts", watched)
    pairs = [Pair(model.narrowed(span), seed) for seed, span in enumerate((Span(1, 4), Span(1, 2), Span(2, 4)))]
    works = [pair.start(StepLayout((0,), (2,))) for pair in pairs]
    advance_steps([(work, 2) for work in works])
    for pair, work in zip(pairs, works, strict=True):
        pair.finish(work)
    assert computed == [(Span(1, 2), 2), (Span(2, 4), 2)]


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_a_step_that_cuts_a_pass_does_not_cut_what_is_filled(layout, tmp_path_factory, monkeypatch):
    """A piece between two exits was chosen for speed. A step of a part of it changes nothing for tokens that left."""
    model = load_as(layout, "llama", tmp_path_factory).with_exits(FakeExits({2: [1.0]}))
    filled = []

    def watched(piece, parts):
        filled.append((piece.span, len(parts)))
        return fill_parts(piece, parts)

    monkeypatch.setattr(span_pass, "fill_parts", watched)
    expected = SessionCache(model.with_strategy(model.strategy).with_exits(FakeExits({2: [1.0]})))
    leaving, cutting = SessionCache(model), SessionCache(model.narrowed(Span(1, 3)))
    terms, random = ExitThresholds("similarity", ((2, 0.5),)), torch.Generator().manual_seed(0)
    for position in range(3):
        hidden, layout = torch.randn(1, HIDDEN, generator=random), StepLayout((position,), (1,))
        exits = StepExits(terms, (0,)) if position == 1 else None
        alone = expected.start_step(hidden, layout, exits)
        advance_steps([(alone, 1)])
        alone.commit()
        filled.clear()
        steps = [leaving.start_step(hidden, layout, exits), cutting.start_step(hidden, layout)]
        advance_steps([(step, 1) for step in steps])
        for step in steps:
            step.commit()
        close(steps[0].output, alone.output)
        assert filled == ([(Span(2, 4), 1)] if position == 1 else [])


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_every_packed_layout(layout, tmp_path_factory):
    model = with_exits(load_as(layout, "llama", tmp_path_factory))
    assert model.strategy.layout == layout

    check_decode_steps(model, examples=25)


def test_padded_sequences_are_computed_in_full(tmp_path_factory):
    """No token leaves there. One that left before stays as it is, and its cache is that of a token that did not."""
    model = with_exits(load_as("padded", "llama", tmp_path_factory))
    assert not model.can_fill
    cache, plain = SessionCache(model), SessionCache(model)
    terms = ExitThresholds("similarity", ((2, 0.0),))
    for position, left in enumerate(((0, 0), (1, 0), (1, 1), (0, 1), (0, 0))):
        layout, hidden = StepLayout((position,) * 2, (1, 1)), torch.randn(2, HIDDEN)
        step = cache.start_step(hidden, layout, StepExits(terms, left))
        advance_steps([(step, 2)])
        step.commit()
        assert step.exits == StepExits(terms, left)
        output = plain.step(hidden, layout)
        close(step.output, torch.where(torch.tensor(left).bool().unsqueeze(1), hidden, output))


def leaves(model: SpanModel, confidence: ExitConfidence, thresholds: dict[int, float], rows: int, rule: ExitBatchRule):
    """Where tokens of `rows` sequences leave."""
    cache = SessionCache(model)
    cache.step(torch.randn(2 * rows, HIDDEN), StepLayout((0,) * rows, (2,) * rows))
    terms = ExitThresholds(confidence, tuple(thresholds.items()), rule)
    step = cache.start_step(
        torch.randn(rows, HIDDEN), StepLayout((2,) * rows, (1,) * rows), StepExits(terms, (0,) * rows)
    )
    advance_steps([(step, rows)])
    assert step.exits is not None
    return step.exits.left


class FakeExits(SpanExits):
    """Exits where it is known how sure each sequence is."""

    def __init__(self, sure: dict[int, list[float]]) -> None:
        super().__init__(tuple(sure))
        object.__setattr__(self, "sure", sure)

    def measures(self, confidence, block):
        return block in self.blocks and confidence == "similarity"

    def measure(self, confidence, block, before_RH, hidden_RH):
        return torch.tensor(self.sure[block][: len(hidden_RH)])


def test_a_threshold_is_exceeded_not_reached(tmp_path_factory):
    model = load("llama", tmp_path_factory)
    sure = model.with_exits(FakeExits({2: [0.5, 0.51], 3: [1.0, 1.0]}))
    assert leaves(sure, "similarity", {2: 0.5}, 2, "row") == (0, 2)
    assert leaves(sure, "similarity", {2: 0.5, 3: 1.0}, 2, "row") == (0, 2)
    assert leaves(sure, "similarity", {2: 1.0, 3: 0.9}, 2, "row") == (3, 3)
    assert leaves(sure, "similarity", {1: 0.0, 4: 0.0, 5: 0.0}, 2, "row") == (0, 0)
    assert leaves(sure, "softmax", {2: 0.0}, 2, "row") == (0, 0)


def test_a_batch_that_is_computed_in_portions_does_not_leave(tmp_path_factory):
    model = load("llama", tmp_path_factory).with_exits(FakeExits({2: [0.9, 0.9]}))
    for rule, expected in (("all", (0, 0)), ("row", (2, 2))):
        terms = ExitThresholds("similarity", ((2, 0.5),), rule)
        step = SessionCache(model).start_step(
            torch.randn(2, HIDDEN), StepLayout((0, 0), (1, 1)), StepExits(terms, (0, 0))
        )
        for _ in range(2):
            advance_steps([(step, 1)])
        assert step.exits == StepExits(terms, expected)


def test_steps_without_exits_compute_as_they_always_did(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    hidden, layout = torch.randn(3, HIDDEN), StepLayout((0,), (3,))
    expected = SessionCache(model).step(hidden, layout)
    with_some = with_exits(model)
    monkeypatch.setattr(with_some, "pieces", None)
    assert torch.equal(SessionCache(with_some).step(hidden, layout), expected)


@pytest.mark.parametrize("family", ["llama", "gpt2", "deepseek_v3"])
def test_a_traced_fill_is_what_the_modules_store(family, tmp_path_factory):
    model = load(family, tmp_path_factory)
    filled = model.with_strategy(replace(model.strategy, traced_fill=traced_fill(model)))
    for tokens in (1, 3):
        outputs = []
        hidden = torch.randn(3 * tokens, HIDDEN)
        for one in (model, filled):
            cache = SessionCache(one)
            for position, exits in enumerate((None, StepExits(None, (1,) * tokens), None)):
                layout = StepLayout((position,) * tokens, (1,) * tokens)
                step = cache.start_step(hidden[position * tokens :][:tokens], layout, exits)
                advance_steps([(step, tokens)])
                step.commit()
            outputs.append(step.output)
        close(outputs[1], outputs[0])


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_pieces_that_were_chosen_for_speed(layout, tmp_path_factory):
    model = with_exits(load_as(layout, "llama", tmp_path_factory))
    choose_exit_forwards(model)
    pieces = model.pieces()
    assert [one.span for one in pieces] == [Span(1, 2), Span(2, 3), Span(3, 4)]
    assert model.narrowed(Span(2, 4)).pieces() == pieces[1:]

    check_decode_steps(model, examples=10)
