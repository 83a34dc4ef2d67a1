"""Tokens of several sessions in one forward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import StepLayout
from swarm.models.attention import contiguous_attention
from swarm.models.attention.multi_session_attention import PackingUnsupported
from swarm.models.execution.session_cache import SessionCache, StepComputation, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy_choice import choose_layout
from tests.models.execution.test_session_cache import HIDDEN, Session, close, load


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=5), st.data())
def test_parts_of_a_step_bring_each_token_once_and_in_order(rows, data):
    starts, counts = zip(*rows, strict=True)
    work = StepComputation(None, StepLayout(starts, counts), torch.empty(sum(counts), 1), None)
    seen: list[list[int]] = [[] for _ in rows]
    while work.tokens_left:
        tokens = data.draw(st.integers(1, work.tokens_left))
        part = work.next_layout(tokens)
        assert part.tokens == tokens
        for row, (start, count) in enumerate(zip(part.starts, part.counts, strict=True)):
            seen[row].extend(range(start, start + count))
        work.tokens_done += tokens
    assert seen == [list(range(start, start + count)) for start, count in rows]


def test_one_forward_serves_all_sessions(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    sizes = []
    forward = model.forward_tokens

    def note(hidden, *args):
        sizes.append(len(hidden))
        return forward(hidden, *args)

    monkeypatch.setattr(model, "forward_tokens", note)
    works = [
        SessionCache(model).start_step(torch.randn(tokens, HIDDEN), StepLayout((0,), (tokens,))) for tokens in (1, 5, 3)
    ]
    advance_steps([(work, work.tokens_left) for work in works])
    assert sizes == [9]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_attention_that_is_written_out_keeps_few_scores_at_once(family, tmp_path_factory, monkeypatch):
    model = load(family, tmp_path_factory)
    whole, cut = SessionCache(model), SessionCache(model)
    prompt, more = torch.randn(40, HIDDEN), torch.randn(23, HIDDEN)
    expected = [whole.step(prompt, StepLayout((0,), (40,))), whole.step(more, StepLayout((40,), (23,)))]
    softmax, sizes = torch.softmax, []

    def note(scores, **options):
        sizes.append(scores.numel())
        return softmax(scores, **options)

    monkeypatch.setattr(contiguous_attention, "MAX_SCORES", 1000)
    monkeypatch.setattr(torch, "softmax", note)
    found = [cut.step(prompt, StepLayout((0,), (40,))), cut.step(more, StepLayout((40,), (23,)))]
    for one, other in zip(found, expected, strict=True):
        close(one, other)
    heads = 4
    assert max(sizes) <= 1000 + heads * 64  # a learned sink is one more
    assert len(sizes) > 2 * model.span.length


def test_a_failed_forward_of_many_sessions_harms_none(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    sessions = [Session(model, seed) for seed in range(3)]
    for session in sessions:
        session.append(4)
    layout = StepLayout((4,), (2,))
    works = [session.cache.start_step(session.inputs(layout), layout) for session in sessions]
    with monkeypatch.context() as patch:
        patch.setattr(model.cut, "run", lambda *args: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(MemoryError):
            advance_steps([(work, work.tokens_left) for work in works])
    for session in sessions:
        session.append(2)


def test_attention_that_is_wrong_is_found_out_before_it_is_used(tmp_path_factory, monkeypatch):
    model = load("llama", tmp_path_factory)
    attend = SpanModel.forward_tokens

    forgotten = [3]

    def forgets_the_past(self, hidden, positions, batch, tokens):
        outputs = attend(self, hidden, positions, batch, tokens)
        if len(hidden) > 3 or not forgotten:
            return outputs
        forgotten.pop()
        return outputs + 0.01 * outputs.norm()

    monkeypatch.setattr(SpanModel, "forward_tokens", forgets_the_past)
    assert choose_layout(model).strategy.packed  # three tokens of many: a mixture of experts may differ as much
    assert not forgotten
    forgotten = [3] * 100
    assert not choose_layout(model).strategy.packed  # every token with a past

    def forgets_everything(self, hidden, positions, batch, tokens):
        return attend(self, hidden, [0] * len(positions), batch, tokens)

    monkeypatch.setattr(SpanModel, "forward_tokens", forgets_everything)
    assert not choose_layout(model).strategy.packed

    def fails(self, hidden, positions, batch, tokens):
        raise PackingUnsupported("no")

    monkeypatch.setattr(SpanModel, "forward_tokens", fails)
    assert not choose_layout(model).strategy.packed
