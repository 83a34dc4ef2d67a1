"""Parts of a span: which are remembered, and that those which are not leave nothing behind."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch

from swarm.data_structures import ExitThresholds, Span, StepLayout
from swarm.errors import InvalidSpan
from swarm.models.cutting import cut_layers
from swarm.models.execution import span_model
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.strategy import PADDED
from swarm.models.exits.span_exits import SpanExits
from tests.models.execution.test_session_cache import HIDDEN, close, load

PARTS = [Span(start, end) for start, end in itertools.combinations(range(1, 5), 2) if end - start < 3]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> SpanModel:
    return load("gemma2", tmp_path_factory)


def hooks(model: SpanModel) -> int:
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in model.layers)


def test_parts_share_weights_and_belong_to_one_whole(model):
    part = model.narrowed(Span(1, 3))
    assert part is model.narrowed(Span(1, 3))
    assert part.narrowed(Span(2, 3)) is model.narrowed(Span(2, 3))
    assert part.narrowed(Span(2, 3)).whole is model
    assert model.whole is model.narrowed(model.span) is model
    assert part.layers[0] is model.layers[0]
    for other in (Span(0, 2), Span(3, 5)):
        with pytest.raises(InvalidSpan, match="not a part of the span 1:4"):
            model.narrowed(other)


def test_a_part_that_does_not_hold_the_blocks_refuses_them_also_where_a_piece_was_chosen_for_them(tmp_path_factory):
    whole = load("llama", tmp_path_factory)
    whole.use_part(whole.with_strategy(whole.strategy).narrowed(Span(3, 4)))
    assert whole.narrowed(Span(2, 4)).narrowed(Span(3, 4)) is whole.narrowed(Span(3, 4))
    with pytest.raises(InvalidSpan, match="not a part of the span 1:3"):
        whole.narrowed(Span(1, 3)).narrowed(Span(3, 4))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_part_that_is_made_while_the_attention_is_switched_uses_the_right_one(family, tmp_path_factory, monkeypatch):
    """Its config is copied first, and switched with the others from then on; in between is the other thread."""
    whole = load(family, tmp_path_factory)
    padded = whole.with_strategy(PADDED)
    hidden, layout = torch.randn(2, HIDDEN), StepLayout((0,), (2,))
    for copied_as, used_as in ((padded, whole), (whole, padded)):
        SessionCache(copied_as).step(hidden, layout)
        copied = cut_layers.slice_model

        def switched(*args, model=used_as, copied=copied):
            made = copied(*args)
            SessionCache(model).step(hidden, layout)
            return made

        with monkeypatch.context() as patch:
            patch.setattr(cut_layers, "slice_model", switched)
            part = used_as.with_strategy(used_as.strategy).narrowed(Span(2, 4))
        found = SessionCache(part).step(hidden, layout)
        close(found, SessionCache(copied_as.narrowed(Span(2, 4))).step(hidden, layout))


def test_parts_that_were_used_longest_ago_are_forgotten_and_leave_nothing(model, monkeypatch):
    monkeypatch.setattr(span_model, "MAX_PARTS_PER_BLOCK", 1)
    before = hooks(model)
    first = weakref.ref(model.narrowed(PARTS[0]).module)
    session = SessionCache(model.narrowed(PARTS[0]))
    hidden = torch.randn(2, HIDDEN)
    expected = session.step(hidden, StepLayout((0,), (2,)))
    for part in [*PARTS, *PARTS]:
        SessionCache(model.narrowed(part)).step(torch.randn(2, HIDDEN), StepLayout((0,), (2,)))
        assert len(model._parts) <= model.span.length
    assert list(model._parts) == PARTS[-model.span.length :]
    assert hooks(model) == before
    assert first() is not None  # a session uses it
    close(SessionCache(model.narrowed(PARTS[0])).step(hidden, StepLayout((0,), (2,))), expected)
    del session
    for part in PARTS[1:]:
        model.narrowed(part)
    gc.collect()
    assert first() is None
    # Switching between the family's attention and ours does not go through what is gone.
    assert len(model.cut.attention._family) <= 1 + model.span.length


def test_parts_may_be_asked_for_in_any_thread(model, monkeypatch):
    monkeypatch.setattr(span_model, "MAX_PARTS_PER_BLOCK", 1)
    errors: list[BaseException] = []

    def ask(parts: list[Span]) -> None:
        try:
            for part in parts * 30:
                assert model.narrowed(part).span == part
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(parts,)) for parts in (PARTS, PARTS[::-1], PARTS[2:])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_token_costs_its_blocks_and_what_the_head_reads_of_it(model):
    terms = ExitThresholds("softmax", ((2, 0.5), (3, 1.0), (4, 0.5), (5, 0.0)))
    block_bytes = model.weight_bytes // model.span.length
    exits = SpanExits((2, 3, 4), head=lambda hidden: hidden, head_bytes=2 * block_bytes)
    assert model.token_cost() == model.token_cost(terms) == 3.0
    offering = model.with_exits(exits)
    assert offering.token_cost() == 3.0
    assert offering.token_cost(terms) == pytest.approx(3 + 2 * 2, rel=0.01)
    assert offering.narrowed(Span(2, 4)).token_cost(terms) == pytest.approx(2 + 2, rel=0.01)
    assert offering.token_cost(ExitThresholds("similarity", terms.thresholds)) == 3.0
