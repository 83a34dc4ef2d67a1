"""How sure tokens are inside a span, the head that reads hidden states, and which sequences leave."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from swarm.data_structures import ExitThresholds, Span
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.exits.confidence import softmax_response, state_similarity
from swarm.models.exits.model_head import ModelHead, head_bytes
from swarm.models.exits.span_exits import HEAD_TOKENS, SpanExits, cut_at_exits, sequences_that_leave
from swarm.models.exits.trained_exits import BaseModel, ExitClassifier, ExitLens, TrainedExits
from tests import zoo

HIDDEN, ROWS = 32, 5


def trained(*blocks: int) -> TrainedExits:
    lenses = {block: ExitLens(torch.randn(HIDDEN, HIDDEN), torch.randn(HIDDEN)) for block in blocks[:1]}
    classifiers = {block: ExitClassifier(torch.randn(HIDDEN), torch.randn(1)) for block in blocks}
    return TrainedExits(BaseModel("m", "r", HIDDEN, 6), lenses, classifiers)


def head(hidden_RH: torch.Tensor) -> torch.Tensor:
    return hidden_RH @ torch.arange(HIDDEN * 7).view(HIDDEN, 7).float().sin()


def test_each_confidence():
    before, hidden = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    exits = SpanExits((2, 4), head, trained(2, 4))

    def measured(confidence, block):
        return exits.measure(confidence, block, before, hidden)

    assert measured("similarity", 2).equal(state_similarity(before, hidden))
    assert measured("classifier", 4).equal(exits.trained.classifiers[4](hidden))
    assert measured("softmax", 4).equal(softmax_response(head(hidden)))
    assert measured("softmax", 2).equal(softmax_response(head(exits.trained.lenses[2](hidden))))


def test_the_head_reads_a_few_tokens_at_once():
    hidden, sizes = torch.randn(3 * HEAD_TOKENS + 5, HIDDEN), []

    def noted(hidden_RH: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden_RH))
        return head(hidden_RH)

    found = SpanExits((2,), noted).measure("softmax", 2, hidden, hidden)
    torch.testing.assert_close(found, softmax_response(head(hidden)))
    assert sizes == [HEAD_TOKENS] * 3 + [5]


@pytest.mark.parametrize(
    ("confidence", "thresholds", "applies"),
    [
        ("similarity", ((2, 0.5),), True),
        ("similarity", ((4, 0.5),), True),  # where the next server begins
        ("similarity", ((6, 0.5),), False),  # behind the span
        ("similarity", ((3, 0.5),), False),  # no exit
        ("similarity", ((2, 1.0), (4, 1.0)), False),
        ("classifier", ((2, 0.5),), False),
        ("classifier", ((4, 0.5),), True),
        ("softmax", ((2, 0.5),), False),
    ],
)
def test_terms_that_apply_to_a_span(confidence, thresholds, applies):
    exits = SpanExits((2, 4, 6), None, trained(4))
    assert exits.applies(ExitThresholds(confidence, thresholds), Span(1, 4)) is applies


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "gpt2", "opt", "opt_projected", "cohere", "granite", "qwen2_moe"]
)
def test_the_head_reads_as_the_whole_model_does(family, tmp_path):
    folder = zoo.make_checkpoint(family, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    checkpoint = open_checkpoint(folder)
    states: list[torch.Tensor] = []
    layers = model.base_model.get_submodule(checkpoint.structure.layers_path)

    def keep(module, args, output):
        states.append(output[0] if isinstance(output, tuple) else output)

    layers[-1].register_forward_hook(keep)
    expected = model(input_ids=torch.tensor([zoo.PROMPTS[0]])).logits[0]
    found = ModelHead(checkpoint, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(found(states[0][0]), expected, rtol=1e-4, atol=1e-4)
    embeddings = model.get_input_embeddings().weight.numel() * 4
    held = sum(one.nbytes for one in found._model.parameters())
    assert held == head_bytes(checkpoint, torch.float32)
    assert held >= embeddings  # the head, which may be the same tensor


numbers = st.lists(st.integers(0, 20), unique=True, max_size=8)


@given(numbers, st.sets(st.integers(0, 20)))
def test_a_batch_leaves_whole_or_not_at_all(waiting, sure):
    assert sequences_that_leave("all", waiting, sure) == (waiting if sure.issuperset(waiting) else [])


def test_a_batch_leaves_where_its_last_sequence_becomes_sure():
    sure: set[int] = set()
    for block, now in ((2, {0}), (4, {1}), (6, set()), (8, {2, 0})):
        sure |= now
        assert sequences_that_leave("all", [0, 1, 2], sure) == ([0, 1, 2] if block == 8 else [])


@given(st.integers(0, 20), st.integers(1, 20), st.sets(st.integers(0, 45)))
def test_each_exit_inside_has_a_piece_of_one_block_before_it(start, length, exits):
    span = Span(start, start + length)
    pieces = cut_at_exits(span, exits)
    assert [one.start for one in pieces] == [span.start, *(one.end for one in pieces[:-1])]
    assert pieces[-1].end == span.end
    for block in exits:
        if span.start < block <= span.end:
            assert Span(block - 1, block) in pieces
    assert len(pieces) <= 2 * len(exits) + 1
