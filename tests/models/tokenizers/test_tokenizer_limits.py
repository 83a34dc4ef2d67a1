"""Decoders that make long texts of single tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from swarm.errors import CheckpointError
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.tokenizer import load_tokenizer
from swarm.models.tokenizers.tokenizer_limits import (
    MAX_DECODER_GROWTH,
    MAX_DECODER_STEPS,
    MAX_TOKEN_CHARACTERS,
    decoder_problem,
)
from tests.models.tokenizers.hostile import save_tokenizer

LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def description(*steps: decoders.Decoder) -> dict[str, object]:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence(list(steps))
    return json.loads(tokenizer.to_str())["decoder"]


@pytest.mark.parametrize(
    "steps",
    [
        LLAMA,
        [decoders.ByteLevel()],
        [decoders.WordPiece()],
        [decoders.Metaspace()],
        [decoders.CTC()],
        [decoders.Fuse()],
    ],
    ids=["llama", "byte level", "word piece", "metaspace", "ctc", "fuse"],
)
def test_usual_decoders(steps):
    assert decoder_problem(description(*steps)) == ""


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([decoders.Replace("a", "aa")] * 7, "128 times longer"),
        ([decoders.Replace("a", "b" * 100)], "100 times longer"),
        ([decoders.Sequence([decoders.Replace("a", "a" * 9)]), decoders.Replace("b", "b" * 9)], "81 times longer"),
        ([decoders.Replace(Regex("(a+)+$"), "")], "regular expression"),
        ([decoders.Replace("", "a")], "regular expression"),
        ([decoders.Fuse()] * (MAX_DECODER_STEPS + 1), "33 steps"),
    ],
)
def test_hostile_decoders(steps, problem):
    assert problem in decoder_problem(description(*steps))


@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=2), st.text("ab", max_size=6)), max_size=6),
    st.text("ab", max_size=8),
)
def test_what_an_accepted_decoder_writes_is_short(replacements, text):
    """Each replacement may come once more than the pattern fits, at the text's end."""
    steps = [decoders.Replace(one, other) for one, other in replacements]
    if not steps or decoder_problem(description(*steps)):
        return
    assert len(decoders.Sequence(steps).decode([text])) <= MAX_DECODER_GROWTH * max(1, len(text))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda one: one.update(decoder=description(*[decoders.Replace("a", "aa")] * 30)), "times longer"),
        (lambda one: one["model"]["vocab"].update({"x" * (MAX_TOKEN_CHARACTERS + 1): 9999}), "4097 characters"),
        (lambda one: one.pop("model"), "no usable tokenizer"),
        (lambda one: one.update(version=7), "no usable tokenizer"),
    ],
)
def test_a_tokenizer_that_is_not_used(tmp_path, change, problem):
    with pytest.raises(CheckpointError, match=problem):
        load_tokenizer(save_tokenizer(tmp_path, change))


def test_the_demo_model_has_a_usual_tokenizer():
    assert load_tokenizer(DEMO_FOLDER).decode(load_tokenizer(DEMO_FOLDER)("Once upon").input_ids) == "Once upon"
