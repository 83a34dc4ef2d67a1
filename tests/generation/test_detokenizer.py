"""From tokens to text, piece by piece and token by token."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from swarm.generation.detokenizer import IncrementalDetokenizer, token_text
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO_FOLDER)


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=30)


@given(text=TEXTS, start=st.integers(0, 10))
def test_joined_pieces_are_the_text(tokenizer, text, start):
    ids = tokenizer(text)["input_ids"]
    start = min(start, len(ids))
    pieces = IncrementalDetokenizer(tokenizer, ids[:start])
    told = [pieces.add_token(token) for token in ids[start:]] + [pieces.finish()]
    whole, front = (tokenizer.decode(some, clean_up_tokenization_spaces=False) for some in (ids, ids[:start]))
    if not front.endswith("\ufffd"):  # cut in the middle of a character: its first half was never text
        assert "".join(told) == whole[len(front) :]


def test_characters_are_never_split(tokenizer):
    pieces = IncrementalDetokenizer(tokenizer)
    told = [pieces.add_token(token) for token in tokenizer("漢字 😀")["input_ids"]]
    assert "".join(told) == "漢字 😀"
    assert not any("\ufffd" in piece for piece in told)


@pytest.fixture(scope="module")
def bytewise():
    """As SentencePiece: characters without a token become bytes, and neighboring bytes are decoded together."""
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


def test_incomplete_characters_are_shown_at_the_end(tokenizer):
    half = tokenizer("漢")["input_ids"][:1]
    pieces = IncrementalDetokenizer(tokenizer)
    assert pieces.add_token(half[0]) == ""
    assert pieces.finish() == "\ufffd"
    many = IncrementalDetokenizer(tokenizer)
    assert any(many.add_token(half[0]) for _ in range(20))


def test_special_tokens_are_hidden_by_default(tokenizer):
    end = tokenizer.eos_token_id
    assert IncrementalDetokenizer(tokenizer).add_token(end) == ""
    assert IncrementalDetokenizer(tokenizer, keep_special=True).add_token(end) == "<|endoftext|>"
    assert token_text(tokenizer, end)[0] == "<|endoftext|>"
