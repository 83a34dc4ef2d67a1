"""Thoughts apart from the answer."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.generation.formats.thinking import ConstraintBehindThoughts, ThinkingParser, thinking_syntax

SYNTAX = thinking_syntax("{% if x %}<think>{% endif %}</think>")
assert SYNTAX is not None
OPENS, CLOSES, WORD, END = range(4)
SCORES = torch.ones(4)


def separated(pieces: list[str], is_open: bool = False) -> tuple[str, str]:
    parser = ThinkingParser(SYNTAX, is_open)
    found = [parser.feed(piece) for piece in pieces] + [parser.finish()]
    return "".join(thought for thought, _ in found), "".join(content for _, content in found)


def test_thoughts_come_before_content():
    for text, is_open, expected in [
        ("<think>\nBecause.\n</think>\n\nSo.", False, ("Because.", "So.")),
        ("\n<think></think>So. ", False, ("", "So. ")),
        ("Because.\n</think>So <think> it </think>", True, ("Because.", "So <think> it </think>")),
        ("\n Because\n\nof that", True, ("Because\n\nof that", "")),
        ("<think> a </thin", False, ("a </thin", "")),
        (" So.", False, ("", " So.")),
        (" <thi", False, ("", " <thi")),
        ("a<think>b</think>", False, ("", "a<think>b</think>")),
        ("", False, ("", "")),
    ]:
        assert separated([text], is_open) == expected


PARTS = st.sampled_from(["<think>", "</think>", "<th", "</", "a", " ", "\n", ">"])


@given(st.lists(PARTS, max_size=12), st.booleans(), st.lists(st.integers(0, 40), max_size=8))
def test_how_the_text_is_divided_changes_nothing(parts, is_open, cuts):
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert separated(pieces, is_open) == separated([text], is_open)


def test_models_that_do_not_mark_thoughts_have_none():
    assert thinking_syntax("{{ messages }}") is None


class Only:
    """Allows one token, and remembers behind which ones."""

    def __init__(self) -> None:
        self.behind: list[list[int]] = []

    def mask(self, tokens, scores_V):
        self.behind.append(list(tokens))
        return torch.where(torch.arange(4) == WORD, scores_V, float("-inf"))


def allowed(constraint: ConstraintBehindThoughts, tokens: list[int]) -> list[int]:
    return [token for token, score in enumerate(constraint.mask(tokens, SCORES).tolist()) if score > float("-inf")]


def test_only_what_follows_a_thought_has_a_form():
    only = Only()
    constraint = ConstraintBehindThoughts(only, OPENS, CLOSES, is_open=False, end_tokens=[END])
    assert allowed(constraint, []) == [OPENS, WORD]
    assert allowed(constraint, [WORD]) == [WORD]
    assert allowed(constraint, [OPENS]) == allowed(constraint, [OPENS, WORD]) == [OPENS, CLOSES, WORD]
    assert allowed(constraint, [OPENS, WORD, CLOSES, WORD]) == [WORD]
    assert only.behind == [[], [WORD], [WORD]]


def test_a_thought_that_the_prompt_has_begun():
    constraint = ConstraintBehindThoughts(Only(), None, CLOSES, is_open=True, end_tokens=[END])
    assert allowed(constraint, []) == [OPENS, CLOSES, WORD]
    assert allowed(constraint, [CLOSES]) == [WORD]
    without = ConstraintBehindThoughts(Only(), None, CLOSES, is_open=False, end_tokens=[END])
    assert allowed(without, []) == [WORD]
