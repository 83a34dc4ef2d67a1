"""Where guesses come from: a small model, a draft head, or what stands in the text before.

A draft is asked again after every few tokens, about a text that ends in its own earlier guesses or, when those were
wrong, in other tokens. So it keeps what it has computed of a text, and goes back to where the new one departs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarm.models.draft_head import DraftHead, HeadText
from swarm.models.known_text import KnownText


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that may come next.

    Attributes:
        probability: that it does if all before it stand, as the draft sees it. What that is worth is measured.
    """

    token: int
    probability: float


@dataclass(frozen=True, slots=True)
class Context:
    """A text that is to be continued.

    Attributes:
        tokens: without padding.
        certain: how many of them stand; those behind are guesses.
    """

    tokens: Sequence[int]
    certain: int


Choose = Callable[[Sequence[int], torch.Tensor], int]
"""The token that a model with these logits `[V]` would write behind the context and the tokens given.

Temperature, penalties and random numbers are those with which the swarm's model will choose at this position.
"""


class Draft:
    """A source of guesses for one text.

    Attributes:
        name: in events and metrics.
    """

    name: str

    def observe(self, first: int, hidden_NH: torch.Tensor) -> None:
        """Be told the hidden states behind the last block of the tokens from number `first` on, which stand."""

    def propose(self, context: Context, count: int, choose: Choose) -> Sequence[Guess]:
        """At most `count` tokens that follow the context, one behind the other; none if it has no idea."""
        raise NotImplementedError


DraftSource = Callable[[], Draft]
"""Makes a draft for one text."""

MIN_MATCH, MAX_MATCH = 2, 32
"""How many of the last tokens have to stand in the text before, and how many are compared."""

MAX_PLACES = 16
"""Places of one beginning that are compared: the last ones."""


class CopyDraft(Draft):
    """Guesses that the text goes on as it did before: what followed the longest match of its last tokens.

    Prompt look-up decoding (Saxena, 2023), with the length of the match as confidence.
    """

    name = "copies"

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], list[int]] = {}
        """By `MIN_MATCH` tokens, where each of their occurrences ends; the last ones."""
        self._indexed = 0

    def propose(self, context: Context, count: int, choose: Choose) -> list[Guess]:
        tokens, certain = context.tokens, context.certain
        self._index(tokens, certain)
        if len(tokens) < MIN_MATCH:
            return []
        places = self._places.get(tuple(tokens[-MIN_MATCH:]), [])
        matches = [(_match_length(tokens, place), place) for place in places if place < certain]
        length, place = max(matches, default=(0, 0))
        copied = tokens[place : min(place + count, certain)] if length else ()
        # The longer the match, the surer; calibration finds out how sure.
        return [Guess(token, 1 - 1 / (1 + length + number)) for number, token in enumerate(copied)]

    def _index(self, tokens: Sequence[int], certain: int) -> None:
        """Note the places of all that stands. What stands, stays."""
        for end in range(max(self._indexed + 1, MIN_MATCH), certain + 1):
            places = self._places.setdefault(tuple(tokens[end - MIN_MATCH : end]), [])
            places.append(end)
            del places[:-MAX_PLACES]
        self._indexed = max(self._indexed, certain)


def _match_length(tokens: Sequence[int], place: int) -> int:
    """How many tokens before `place` are the same as the last ones of the text, up to `MAX_MATCH`."""
    end, most = len(tokens), min(place, MAX_MATCH)
    return next((length for length in range(most) if tokens[place - 1 - length] != tokens[end - 1 - length]), most)


class _LogitsDraft(Draft):
    """Guesses the tokens that would be chosen from logits of its own.

    Args:
        vocabulary: how many tokens it knows. Texts with others, such as an image's, get no guesses.
        logits: `[V]` behind a text; None for no guess.
    """

    def __init__(self, vocabulary: int, logits: Callable[[Sequence[int]], torch.Tensor | None]) -> None:
        self._vocabulary, self._logits = vocabulary, logits

    def propose(self, context: Context, count: int, choose: Choose) -> list[Guess]:
        tokens, guesses = list(context.tokens), list[Guess]()
        if max(tokens) >= self._vocabulary:
            return []
        while len(guesses) < count and tokens[-1] < self._vocabulary:
            logits_V = self._logits(tokens)
            if logits_V is None:
                break
            token = choose(tokens[len(context.tokens) :], logits_V)
            chance = float(logits_V.float().softmax(-1)[token]) if token < len(logits_V) else 0.0
            guesses.append(Guess(token, chance))
            tokens.append(token)
        return guesses


class ModelDraft(_LogitsDraft):
    """Guesses by a small causal language model with the same tokens as the swarm's model (Leviathan et al., 2023).

    Its keys and values are kept for as long as the text only grows, and cut where guesses were wrong.

    Args:
        model: a causal language model of transformers, at this client.

    Raises:
        UsageError: the model's cache cannot be cut.
    """

    name = "model"

    def __init__(self, model: Any) -> None:
        super().__init__(model.get_input_embeddings().num_embeddings, KnownText(model).logits)


class HeadDraft(_LogitsDraft):
    """Guesses by a draft head, which the client has trained: see `swarm.models.draft_head`.

    Args:
        embeddings: of the swarm's model.
        read: hidden states `[1, 1, H]` behind its last block to logits `[1, V]`.
    """

    name = "head"

    def __init__(self, head: DraftHead, embeddings: Any, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(embeddings.num_embeddings, self._read_guess)
        self._text, self._read, self._dtype = HeadText(head, embeddings), read, embeddings.weight.dtype

    def observe(self, first: int, hidden_NH: torch.Tensor) -> None:
        self._text.learn(first, hidden_NH)

    def _read_guess(self, tokens: Sequence[int]) -> torch.Tensor | None:
        hidden_H = self._text.guess(tokens)
        return None if hidden_H is None else self._read(hidden_H.view(1, 1, -1).to(self._dtype))[0]


class CandidateDraft(Draft):
    """Guesses by one of transformers' own candidate generators, for drafts with another vocabulary.

    Universal assisted decoding (Timor et al., 2025): their texts are translated from tokenizer to tokenizer.

    Args:
        generator: a `CandidateGenerator`.
    """

    name = "model"

    def __init__(self, generator: Any, device: torch.device) -> None:
        self._generator, self._device = generator, device

    def propose(self, context: Context, count: int, choose: Choose) -> list[Guess]:
        text_1T = torch.tensor([list(context.tokens)], device=self._device)
        candidates_1T, _ = self._generator.get_candidates(text_1T)
        return [Guess(token, 0.5) for token in candidates_1T[0, text_1T.shape[1] :].tolist()[:count]]
