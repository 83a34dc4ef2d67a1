"""Tokenizers and chat templates that were changed at random: they work, or are refused with an error of ours."""

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

from swarm.errors import ChatTemplateError, CheckpointError
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.chat_template import conversation_tokens
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.models.tokenizers.hostile import save_tokenizer

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
