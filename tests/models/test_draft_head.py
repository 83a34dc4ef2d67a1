"""Draft heads: what they guess of a text that changes, and their files."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from swarm.errors import AdapterError, AdapterMismatch, UsageError
from swarm.models import draft_head
from swarm.models.adapters.adapter_files import AdapterSource
from swarm.models.draft_head import FORMAT, HEAD_FILE, DraftHead, HeadText
from swarm.models.exits.trained_exits import BaseModel
from tests.models.checkpoints.test_mutations import FLIPS, HEADER_CHANGES, flipped, with_header

WIDTH, VOCABULARY = 8, 16
BASE = BaseModel("model", "abc", WIDTH, 3)
HEAD = DraftHead(BASE, WIDTH)
torch.manual_seed(0)
EMBED = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)


def real_states(tokens: Sequence[int]) -> torch.Tensor:
    """What the model's last block would leave: something that depends on all tokens before, `[N, H]`."""
    weights = 1 + torch.arange(len(tokens)).unsqueeze(1) % 3
    return torch.cumsum(EMBED(torch.tensor(tokens)) * weights, 0)


def expected(tokens: Sequence[int], certain: int, begin: int) -> torch.Tensor:
    """The guess behind `tokens`, of which `certain` stand: one after the other, each over the whole text."""
    hidden_NH = real_states(tokens)[begin : certain - 1]
    for end in range(certain, len(tokens) + 1):
        embedded_1NH = EMBED(torch.tensor([tokens[begin + 1 : end]]))
        guessed_H = HEAD(hidden_NH.unsqueeze(0), embedded_1NH)[0, -1]
        hidden_NH = torch.cat([hidden_NH, guessed_H.unsqueeze(0)])
    return hidden_NH[-1]


TOKENS = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(TOKENS, st.integers(0, 3), st.lists(st.tuples(TOKENS, TOKENS), max_size=5))
def test_guesses_are_those_of_the_whole_text(prompt, begin, rounds):
    text, certain = HeadText(HEAD, EMBED), [5, *prompt]
    begin = min(begin, len(certain) - 1)
    text.learn(begin, real_states(certain)[begin:])
    certain.append(7)
    with torch.no_grad():
        for guesses, right in rounds:
            for count in range(len(guesses) + 1):
                tokens = [*certain, *guesses[:count]]
                torch.testing.assert_close(text.guess(tokens), expected(tokens, len(certain), begin))
            # None of the guesses stands, and the model has written others.
            first, certain = len(certain) - 1, [*certain, *right]
            text.learn(first, real_states(certain)[first:-1])


def test_guesses_that_stand_are_made_better_by_what_came_to_stand():
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    text = HeadText(HEAD, EMBED)
    text.learn(0, real_states(tokens)[:3])
    with torch.no_grad():
        old = torch.stack([text.guess(tokens[:length]) for length in range(4, 9)])
        text.learn(3, real_states(tokens)[3:6])
        errors = [(old[-1] - expected(tokens, 7, 0)).norm()]
        errors += [(text.guess(tokens) - expected(tokens, 7, 0)).norm() for _ in range(2)]
    assert errors[2] < 1e-5 < errors[0]


def test_a_long_text_is_known_as_far_as_a_window_reaches(monkeypatch):
    monkeypatch.setattr(draft_head, "WINDOW_TOKENS", 6)
    tokens = [place * 7 % VOCABULARY for place in range(40)]
    states = real_states(tokens)
    text = HeadText(HEAD, EMBED)
    text.learn(0, states[:20])
    with torch.no_grad():
        torch.testing.assert_close(text.guess(tokens[:21]), expected(tokens[:21], 21, 14))
        for end in range(21, 40):
            text.learn(end - 1, states[end - 1 : end])
            found = text.guess(tokens[: end + 1])
            assert len(text._hidden) <= 2 * 6 + 1
            torch.testing.assert_close(found, expected(tokens[: end + 1], end + 1, text._begin))


def test_nothing_is_guessed_of_a_text_of_which_nothing_is_known():
    text = HeadText(HEAD, EMBED)
    assert text.guess([1, 2, 3]) is None
    text.learn(2, real_states([1, 2, 3, 4])[2:3])
    assert text.guess([1, 2, 3]) is None
    assert text.guess([1, 2, 3, 4]) is not None
    text.learn(9, real_states([1] * 10)[9:])  # some were computed in another way
    assert text.guess([1] * 11) is not None


def load(folder: Path, base: BaseModel = BASE, embedding_size: int = WIDTH) -> DraftHead:
    return DraftHead.load(AdapterSource(str(folder)), base, embedding_size)


def test_what_is_written_is_read(tmp_path):
    head = DraftHead(BASE, WIDTH)
    nn.init.normal_(head.join.weight)
    head.save(tmp_path / "head")
    found = load(tmp_path / "head").state_dict()
    assert found.keys() == head.state_dict().keys()
    assert all(found[name].equal(tensor) for name, tensor in head.state_dict().items())
    head.bfloat16().save(tmp_path)
    assert load(tmp_path).join.weight.dtype == torch.float32


def test_files_of_other_models_and_other_files(tmp_path):
    with pytest.raises(AdapterError, match=r"has no draft_head.safetensors; model.save_draft"):
        load(tmp_path)
    HEAD.save(tmp_path)
    with pytest.raises(AdapterMismatch, match=r"revision abc of model, and this is def of other; train a draft head"):
        load(tmp_path, BaseModel("other", "def", WIDTH, 3))
    with pytest.raises(AdapterMismatch, match="has the shape"):
        load(tmp_path, embedding_size=9)
    tensors, metadata = load_file(tmp_path / HEAD_FILE), {"format": FORMAT, "name": "model", "revision": "abc"}
    for change, message in (
        ({"join.weight": torch.full((WIDTH, 2 * WIDTH), torch.nan)}, "join.weight holds NaN"),
        ({"join.weight": torch.zeros(WIDTH, 2 * WIDTH, dtype=torch.int8)}, "or is torch.int8"),
        ({"more": torch.zeros(1)}, r"other tensors than a draft head: \['more'\]"),
    ):
        save_file({**tensors, **change}, tmp_path / HEAD_FILE, metadata=metadata)
        with pytest.raises(AdapterError, match=message):
            load(tmp_path)
    save_file(tensors, tmp_path / HEAD_FILE, metadata={**metadata, "format": "other"})
    with pytest.raises(AdapterError, match=r"does not hold a draft head of a model; model.train_draft trains that"):
        load(tmp_path)


@settings(max_examples=60, deadline=None)
@given(HEADER_CHANGES, st.integers(0, 9), st.none() | st.sampled_from([0, 7, 10**6, 2**63]), FLIPS, st.booleans())
def test_changed_files(tmp_path_factory, changes, place, length, flips, are_bytes):
    folder = tmp_path_factory.mktemp("head")
    HEAD.save(folder)
    data = (folder / HEAD_FILE).read_bytes()
    (folder / HEAD_FILE).write_bytes(flipped(data, flips) if are_bytes else with_header(data, changes, place, length))
    with suppress(UsageError):
        load(folder)
    shutil.rmtree(folder)
