"""From the tokens of a sequence to its output."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_output import IncrementalDetokenizer, SequenceOutput, StopSequenceFilter, token_text
from swarm.generation.sequence_request import SequenceRequest
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


words = st.text("ab\n", max_size=12)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    watch = StopSequenceFilter(stops)
    shown = "".join([watch.feed(piece) for piece in pieces])
    return shown + ("" if watch.hit else watch.finish()), watch.hit


@given(text=words, stops=stop_lists, cuts=st.lists(st.integers(0, 12), max_size=6))
def test_pieces_do_not_matter(text, stops, cuts):
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)]
    assert run(stops, pieces) == run(stops, list(text))


@given(text=words, stops=stop_lists)
def test_the_text_ends_before_the_first_complete_stop(text, stops):
    shown, hit = run(stops, list(text))
    ends = [end for end in range(1, len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert (shown, hit) == (text, None)
    else:
        stopped = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        assert (shown, hit) == (text[: ends[0] - len(stopped)], stopped)


def test_held_text_is_shown_once_it_cannot_be_a_stop():
    watch = StopSequenceFilter(["###"])
    assert [watch.feed(piece) for piece in ["one #", "# ", "two##"]] == ["one ", "## ", "two"]
    assert watch.finish() == "##"


@pytest.mark.parametrize("stops", [[], ["x"]])
def test_nothing_is_held_without_a_reason(stops):
    assert StopSequenceFilter(stops).feed("abc") == "abc"


@given(st.text("abE", max_size=8), st.text("abE", max_size=8))
def test_a_preview_is_what_would_be_shown(before, after):
    stops = ["EE", "abb"]
    used = StopSequenceFilter(stops)
    shown = used.feed(before)
    preview = used.preview(after)
    assert used.preview(after) == preview, "it leaves the filter as it is"
    assert used.feed(after) + used.finish() == preview
    assert all(stop not in shown + preview for stop in stops)


def test_a_stop_sequence_in_text_that_was_held_back_counts():
    pieces: Any = SimpleNamespace(add_token=lambda token: "", finish=lambda: "so END far")
    text = SequenceOutput(pieces, SequenceRequest(stops=["END"]))
    assert text.add_token(SampledToken(1), is_end=False) is None
    assert text.finish().text == "so "
    assert text.stopped


def test_a_preview_leaves_the_output_as_it_is():
    pieces: Any = SimpleNamespace(
        add_token=lambda token: f"{token} ", preview=lambda tokens: "".join(f"{token} " for token in tokens)
    )
    output = SequenceOutput(pieces, SequenceRequest(stops=["5"]))
    assert output.preview([]) == ""
    assert output.preview([2, 3]) == "2 3 "
    assert output.preview([4, 5, 6]) == "4 "
    delta = output.add_token(SampledToken(2), is_end=False)
    assert delta is not None
    assert delta.text == "2 "
    assert not output.stopped
    with_tools: Any = SequenceRequest(tools=SimpleNamespace())  # type: ignore[arg-type]
    assert SequenceOutput(pieces, with_tools).preview([2]) == ""
