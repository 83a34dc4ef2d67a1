"""Choosing tokens for somebody else, and telling them as text."""

from __future__ import annotations

import math
import re
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from swarm.generation.detokenizer import IncrementalDetokenizer, token_text
from swarm.generation.sampling import SampledToken, Sampler, SamplingOptions
from swarm.models.checkpoints.checkpoint import DEMO
from swarm.models.checkpoints.tokenizer import load_tokenizer

SCORES = torch.tensor([[1.0, 3.0, 2.0, -1.0, 0.0]])


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO)


def choose(sampling: SamplingOptions, count: int = 1, constraint=None) -> list[SampledToken]:
    chosen: list[SampledToken] = []
    sampler = Sampler(sampling, constraint, chosen.append)
    for _ in range(count):
        left = sampler(torch.zeros(1, 1, dtype=torch.long), SCORES)
        assert int(left.argmax()) == chosen[-1].token
        assert int((left > float("-inf")).sum()) == 1
    return chosen


def tokens(sampling: SamplingOptions, count: int = 1) -> list[int]:
    return [chosen.token for chosen in choose(sampling, count)]


def test_greedy_takes_the_most_likely():
    assert tokens(SamplingOptions(temperature=0), 3) == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-9, 1e-40, 5e-324])
def test_next_to_no_temperature_is_none(temperature):
    assert tokens(SamplingOptions(temperature=temperature), 3) == [1, 1, 1]


def test_frequencies_are_those_of_the_softmax():
    counts = Counter(tokens(SamplingOptions(seed=1), 4000))
    expected = torch.softmax(SCORES[0], 0)
    for token in range(5):
        assert counts[token] / 4000 == pytest.approx(float(expected[token]), abs=0.03)


def test_the_same_seed_is_the_same_text_whatever_others_sample():
    first = tokens(SamplingOptions(seed=5), 20)
    torch.manual_seed(0)
    sampler_state = torch.get_rng_state()
    assert tokens(SamplingOptions(seed=5), 20) == first
    assert torch.equal(torch.get_rng_state(), sampler_state)
    assert tokens(SamplingOptions(seed=6), 20) != first
    assert tokens(SamplingOptions(), 20) != tokens(SamplingOptions(), 20)


def test_sets_are_narrowed():
    assert set(tokens(SamplingOptions(top_k=2, seed=1), 200)) == {1, 2}
    assert set(tokens(SamplingOptions(top_p=0.5, seed=1), 200)) == {1}


def test_penalties_count_what_was_generated():
    # 3 and 2: after one choice of token 1 its score is 3 - 1.5 = 1.5.
    assert tokens(SamplingOptions(temperature=0, presence_penalty=1.5), 2) == [1, 2]
    assert tokens(SamplingOptions(temperature=0, frequency_penalty=0.6), 4) == [1, 1, 2, 1]


def test_bias():
    assert tokens(SamplingOptions(temperature=0, logit_bias={3: 100.0})) == [3]
    assert 1 not in tokens(SamplingOptions(seed=2, logit_bias={1: -100.0}), 300)


def test_log_probabilities_are_the_models_own():
    (chosen,) = choose(SamplingOptions(temperature=0, top_logprobs=2))
    expected = torch.log_softmax(SCORES[0], 0)
    assert chosen.logprob == pytest.approx(float(expected[1]))
    assert [token for token, _ in chosen.top_logprobs] == [1, 2]
    assert choose(SamplingOptions(temperature=0, top_logprobs=0))[0].top_logprobs == ()
    assert choose(SamplingOptions(temperature=0))[0].logprob is None


def test_a_constraint_masks_and_hears():
    class Only:
        heard: list[int] = []

        def mask(self, scores_V):
            return torch.where(torch.arange(5) == 4, scores_V, -math.inf)

        def accept(self, token):
            self.heard.append(token)

    only = Only()
    assert [chosen.token for chosen in choose(SamplingOptions(), 3, only)] == [4, 4, 4]
    assert only.heard == [4, 4, 4]


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=30)


@given(text=TEXTS, start=st.integers(0, 10))
def test_pieces_are_the_text(tokenizer, text, start):
    ids = tokenizer(text)["input_ids"]
    start = min(start, len(ids))
    pieces = IncrementalDetokenizer(tokenizer, ids[:start])
    told = [pieces.add_token(token) for token in ids[start:]] + [pieces.finish()]
    whole, front = (tokenizer.decode(some, clean_up_tokenization_spaces=False) for some in (ids, ids[:start]))
    if not front.endswith("\ufffd"):  # cut in the middle of a character: its first half was never text
        assert "".join(told) == whole[len(front) :]


def test_characters_come_whole(tokenizer):
    pieces = IncrementalDetokenizer(tokenizer)
    told = [pieces.add_token(token) for token in tokenizer("漢字 😀")["input_ids"]]
    assert "".join(told) == "漢字 😀"
    assert not any("\ufffd" in piece for piece in told)


@pytest.fixture(scope="module")
def bytewise():
    """As SentencePiece's: characters without a token are bytes, and bytes next to each other are decoded together."""
    tokens = ["<unk>", "▁", "a", "b", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    made = Tokenizer(model)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@given(text=st.text("ab▁é語😀🤣", min_size=1), start=st.integers(0, 20))
def test_characters_of_bytes_that_are_decoded_together(bytewise, text, start):
    told = []
    pieces = IncrementalDetokenizer(bytewise, bytewise(text[:start])["input_ids"])
    for token in bytewise(text[start:])["input_ids"]:
        told.append(pieces.add_token(token))
        assert "\ufffd" not in told[-1]
    whole, front = text.replace("▁", " "), text[:start].replace("▁", " ")
    expected = whole[len(front) :]
    assert "".join([*told, pieces.finish()]) == (expected.removeprefix(" ") if not front else expected)


def test_a_token_of_an_answer_as_text_and_bytes(tokenizer, bytewise):
    for one, text in ((tokenizer, "the 漢字 😀"), (bytewise, "▁a▁漢b😀")):
        ids = one(text)["input_ids"]
        told = [token_text(one, token) for token in ids]
        written = text.replace("▁", " ")
        assert bytes(byte for _, raw in told for byte in raw).decode() == written
        assert "".join(text for text, _ in told if "\ufffd" not in text) == re.sub("[漢字😀]", "", written)


def test_a_token_whose_bytes_are_not_known():
    made = Tokenizer(models.WordLevel({"\ufffd\u2581": 0}, "\ufffd\u2581"))
    assert token_text(PreTrainedTokenizerFast(tokenizer_object=made), 0)[1] is None


def test_bytes_that_are_no_text_are_shown_in_the_end(tokenizer):
    half = tokenizer("漢")["input_ids"][:1]
    pieces = IncrementalDetokenizer(tokenizer)
    assert pieces.add_token(half[0]) == ""
    assert pieces.finish() == "\ufffd"
    many = IncrementalDetokenizer(tokenizer)
    assert any(many.add_token(half[0]) for _ in range(20))


def test_special_tokens_are_left_out_unless_wanted(tokenizer):
    end = tokenizer.eos_token_id
    assert IncrementalDetokenizer(tokenizer).add_token(end) == ""
    assert IncrementalDetokenizer(tokenizer, keep_special=True).add_token(end) == "<|endoftext|>"
    assert token_text(tokenizer, end)[0] == "<|endoftext|>"
