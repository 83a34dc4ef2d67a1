"""Steps whose tokens leave early, against a reference that passes them block by block, alone, by the family's own
attention: a block that a token skips gets the same input as the one where the token left, and its output is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.data_structures import ExitBatchRule, Span, StepLayout
from swarm.models.execution.early_exit import StepExits
from swarm.models.execution.session_cache import SessionCache, StepComputation, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import PADDED
from swarm.models.exits.confidence import state_similarity
from swarm.models.exits.span_exits import SpanExits
from swarm.protocol.messages import ExitTerms
from tests.models.execution.test_session_cache import HIDDEN, close, load, load_as, slow

FAMILIES = ("llama", "gemma2", "gpt2", "qwen3", "deepseek_v3", "mistral", "cohere2", "gpt_oss", "qwen3_moe")
THRESHOLDS = (0.0, 0.9, 0.97, 1.0)
BLOCKS = (2, 3, 4)
"""Exits of a span of the blocks 1:4."""


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
    terms = ExitTerms("similarity", tuple(sorted(thresholds.items())), rule) if data.draw(st.booleans()) else None
    left = tuple(data.draw(st.sampled_from((0, 0, 1))) if count else 0 for count in counts)
    return StepExits(terms, left)


def decode_steps(model: SpanModel, data: st.DataObject, sessions: int, steps: int) -> None:
    """Prompts of some sessions, then single tokens of all of them at once, some of which leave; and rollbacks."""
    pairs = [Pair(model, seed) for seed in range(sessions)]
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


@pytest.mark.parametrize("family", FAMILIES)
def test_any_tokens_of_any_sessions_leave(family, tmp_path_factory):
    model = with_exits(load(family, tmp_path_factory))
    assert model.can_fill

    @given(st.data(), st.integers(1, 3), st.integers(2, 6))
    @settings(slow, max_examples=25)
    def check(data, sessions, steps):
        decode_steps(model, data, sessions, steps)

    check()


@pytest.mark.parametrize("layout", ["paged", "contiguous", "padded"])
def test_every_layout(layout, tmp_path_factory):
    """Padded sequences are computed in full, and none leaves there, but tokens that left before stay as they are."""
    model = load_as(layout, "llama", tmp_path_factory)
    model = with_exits(model) if layout != "padded" else model.with_exits(SpanExits(()))
    assert model.can_fill == (layout != "padded")

    @given(st.data(), st.integers(1, 3), st.integers(2, 6))
    @settings(slow, max_examples=25)
    def check(data, sessions, steps):
        with pytest.MonkeyPatch.context() as patch:
            if layout == "padded":
                patch.setattr(f"{__name__}.BLOCKS", ())
            decode_steps(model, data, sessions, steps)

    check()
