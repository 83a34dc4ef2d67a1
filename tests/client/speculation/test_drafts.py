"""What drafts propose."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.speculation.drafts import MAX_MATCH, Context, CopyDraft, ModelDraft
from swarm.errors import UsageError
from swarm.models.known_text import KnownText, common_length
from tests.client.prompts import greedy, prompt

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def never(behind: Any, logits: Any) -> int:
    raise AssertionError("copies need no logits")


def copies(tokens: list[int], certain: int, count: int = 4) -> list[int]:
    return [guess.token for guess in CopyDraft().propose(Context(tokens, certain), count, never)]


def test_what_followed_the_longest_match_is_copied():
    assert copies([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 11) == [4, 9, 2, 3]
    assert copies([1, 2, 3, 7, 8, 9, 2, 3], 8, count=2) == [7, 8]
    assert copies([1, 2, 3, 4, 5, 6], 6) == []
    assert copies([1], 1) == copies([], 0) == []


def test_only_what_stands_is_copied():
    draft = CopyDraft()
    tokens = [1, 2, 3, 4, 5, 1, 2]
    assert [guess.token for guess in draft.propose(Context(tokens, 7), 2, never)] == [3, 4]
    guessed = [*tokens, 3, 4]
    assert [guess.token for guess in draft.propose(Context(guessed, 7), 9, never)] == [5, 1, 2]
    other = [*tokens, 9, 9, 1, 2]
    assert [guess.token for guess in draft.propose(Context(other, 11), 3, never)] == [9, 9, 1]


def test_longer_matches_are_surer():
    def sure(length: int) -> float:
        text = [50, *range(length), 60, 61, *range(length)]
        return CopyDraft().propose(Context(text, len(text)), 1, never)[0].probability

    assert sure(2) < sure(3) < sure(10) < sure(30) < 1
    assert sure(MAX_MATCH + 1) == sure(MAX_MATCH + 9)


@given(TEXTS, st.integers(1, 6))
def test_copies_stand_in_the_text_behind_what_the_text_ends_with(tokens, count):
    found = copies(tokens, len(tokens), count)
    if found:
        behind = [*tokens[-2:], *found]
        assert any(tokens[at : at + len(behind)] == behind for at in range(len(tokens)))
    else:
        pairs = list(itertools.pairwise(tokens))
        assert len(tokens) < 3 or pairs[-1] not in pairs[:-1]


@given(TEXTS, TEXTS)
def test_common_length(first, second):
    pairs = list(zip(first, second, strict=False))
    expected = next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))
    assert common_length(first, second) == expected


def test_a_model_proposes_its_own_text(local):
    draft = ModelDraft(local)
    expected = greedy(local, prompt(), 12)[0].tolist()
    assert proposed(draft, expected[:7], 3) == expected[7:10]
    assert proposed(draft, expected[:9], 3) == expected[9:12]
    other = [*expected[:8], 77, 78]
    assert proposed(draft, other, 2) == greedy(local, torch.tensor([other]), 2)[0, -2:].tolist()
    assert proposed(draft, expected[:3], 1) == greedy(local, torch.tensor([expected[:3]]), 1)[0, -1:].tolist()


def proposed(draft: ModelDraft, tokens: list[int], count: int) -> list[int]:
    guesses = draft.propose(Context(tokens, len(tokens)), count, lambda behind, logits: int(logits.argmax()))
    assert all(0 < guess.probability <= 1 for guess in guesses)
    return [guess.token for guess in guesses]


def test_a_model_has_no_idea_behind_tokens_that_it_does_not_know(local):
    for tokens in ([5, 6, local.config.vocab_size], [5, local.config.vocab_size, *[6] * 40]):
        assert proposed(ModelDraft(local), tokens, 2) == []


def test_known_texts_are_not_computed_again(local, monkeypatch):
    computed, real = [], local.forward

    def forward(input_ids: torch.Tensor, **more: Any) -> Any:
        computed.append(input_ids.shape[1])
        return real(input_ids=input_ids, **more)

    monkeypatch.setattr(local, "forward", forward)
    text = KnownText(local)
    for tokens in ([5, 6, 7, 8], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [5, 6, 1], [5]):
        expected = real(input_ids=torch.tensor([tokens])).logits[0, -1]
        assert text.logits(tokens).allclose(expected, atol=1e-5)
    assert computed == [4, 1, 1, 1, 1]


def test_models_with_states_are_refused(local, monkeypatch):
    monkeypatch.setattr(local, "_is_stateful", True, raising=False)
    with pytest.raises(UsageError, match="cannot draft, because its state cannot go back"):
        KnownText(local)
