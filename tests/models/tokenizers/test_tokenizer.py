"""Decoders that make long texts, and tokenizers and templates that were changed at random."""

from __future__ import annotations

import copy
import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models

from swarm.errors import ChatTemplateError, CheckpointError
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.chat_template import conversation_tokens
from swarm.models.tokenizers.tokenizer import (
    MAX_DECODER_GROWTH,
    MAX_DECODER_STEPS,
    MAX_TOKEN_CHARACTERS,
    decoder_problem,
    load_tokenizer,
)
from tests.models.tokenizers.hostile import save_tokenizer

LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def description(*steps: decoders.Decoder) -> dict[str, object]:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence(list(steps))
    return json.loads(tokenizer.to_str())["decoder"]


def test_usual_decoders():
    for steps in [
        LLAMA,
        [decoders.ByteLevel()],
        [decoders.WordPiece()],
        [decoders.Metaspace()],
        [decoders.CTC()],
        [decoders.Fuse()],
    ]:
        assert decoder_problem(description(*steps)) == ""


def test_hostile_decoders():
    for steps, problem in [
        ([decoders.Replace("a", "aa")] * 7, "128 times longer"),
        ([decoders.Replace("a", "b" * 100)], "100 times longer"),
        ([decoders.Sequence([decoders.Replace("a", "a" * 9)]), decoders.Replace("b", "b" * 9)], "81 times longer"),
        ([decoders.Replace(Regex("(a+)+$"), "")], "regular expression"),
        ([decoders.Replace("", "a")], "regular expression"),
        ([decoders.Fuse()] * (MAX_DECODER_STEPS + 1), "33 steps"),
    ]:
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


VALUES: Any = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from(
        [10**6, 2**63, 10**30, 1e300, "", "a", "▁", "<|endoftext|>", "ByteLevel", "Sequence", "\0", [], {}]
    ),
    st.lists(st.integers(0, 3), max_size=2),
    st.dictionaries(st.sampled_from(["type", "String", "Regex", "content", "id"]), st.text(max_size=3), max_size=2),
)


def places(value: Any, depth: int = 0) -> list[list[Any]]:
    """Paths to values inside a JSON document, without those of a whole vocabulary."""
    if depth > 5 or not isinstance(value, dict | list):
        return []
    keys = list(value)[:12] if isinstance(value, dict) else list(range(min(4, len(value))))
    return [path for key in keys for path in ([key], *([key, *rest] for rest in places(value[key], depth + 1)))]


@pytest.fixture(scope="module")
def original() -> dict[str, dict[str, Any]]:
    return {
        name: json.loads((DEMO_FOLDER / name).read_text())
        for name in ("tokenizer.json", "tokenizer_config.json")
        if (DEMO_FOLDER / name).is_file()
    }


@settings(max_examples=60)
@given(st.data())
def test_a_changed_tokenizer_works_or_is_refused(tmp_path_factory, original, data):
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    shutil.copy(DEMO_FOLDER / "config.json", folder)
    described = copy.deepcopy(original)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(described)))
        path = data.draw(st.sampled_from(places(described[name])))
        inner: Any = described[name]
        try:
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = data.draw(VALUES)
        except (LookupError, TypeError):
            continue  # an earlier change has removed it
    for name, value in described.items():
        (folder / name).write_text(json.dumps(value))
    try:
        load_tokenizer(folder)
    except CheckpointError:
        pass
    finally:
        shutil.rmtree(folder)


PIECES = st.sampled_from(
    [
        *("{{ messages }}", "{{ messages[0].content }}", "{{ messages[9].content }}", "{{ nothing.at.all }}"),
        *("{{ 1 / 0 }}", "{{ 2 ** 0.5 }}", "{{ 'a' * -1 }}", "{{ strftime_now('%Q') }}", "{% set x = [] %}"),
        *("{% for m in messages %}", "{% endfor %}", "{% if tools %}", "{% endif %}", "{% break %}"),
        *("{{ raise_exception('no') }}", "{{ x.append(1) }}", "{{ ''.__class__ }}", "{{ '%d' % 'a' }}"),
        *("{{ [] | max }}", "{{ namespace(_a=1) }}", "{{ messages | tojson }}", "{{ 'x' | unknown }}"),
        *("{#", "#}", "{{", "}}", "text"),
    ]
)


@settings(max_examples=100)
@given(st.lists(PIECES, min_size=1, max_size=6))
def test_a_random_template_makes_tokens_or_is_refused(tokenizer, pieces):
    tokenizer.chat_template = "".join(pieces)
    with suppress(ChatTemplateError):
        assert isinstance(conversation_tokens(tokenizer, [{"role": "user", "content": "Hi"}], [{}]), list)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))
