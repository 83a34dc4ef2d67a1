"""From scores to the next token, and from tokens to text, for one sequence that is generated for somebody else.

`Sampler` has the form of transformers' logits processors: `generate` calls it last, after what the model's own
generation settings ask for, and then takes the token that it leaves. So a sequence can have its own seed, whatever
other sequences of this process sample meanwhile.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

CONTEXT = 6
"""Tokens that a new one is decoded with at least: some tokenizers join words depending on what stands before."""

CHARACTER = 4
"""Tokens that one character has at most, those of its bytes in UTF-8."""

COLD = 1e-6
"""Temperatures below this are 0: divided by them, scores would become infinite."""

PENDING = 12
"""Tokens that may wait for the rest of a character at most; then they are shown as they are."""


class Constraint(Protocol):
    """What the next token must be, such as the next one of a JSON text."""

    def mask(self, scores_V: torch.Tensor) -> torch.Tensor:
        """Scores `[vocabulary]`, -inf where a token is not allowed."""

    def accept(self, token: int) -> None:
        """`token` is the next one."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token.
        top_p: probability of the smallest set of tokens that is sampled from.
        top_k: size of the set of tokens that is sampled from; None for all.
        presence, frequency: taken off the score of each token once if it was generated, and for each time that it was.
        bias: added to the scores of these tokens.
        seed: of the choice; None for a new one each time.
        top_logprobs: how many likely tokens are told of each position; None tells no log probabilities at all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] | None = None
    seed: int | None = None
    top_logprobs: int | None = None


@dataclass(frozen=True)
class Chosen:
    """A token and, if asked for, its log probability and those of the likeliest tokens, before temperature and sets."""

    token: int
    logprob: float | None = None
    likeliest: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses the tokens of one sequence.

    Args:
        sampling: how.
        constraint: see `Constraint`.
        chosen: is told of every token.
    """

    def __init__(self, sampling: Sampling, constraint: Constraint | None, chosen: Callable[[Chosen], None]) -> None:
        self._sampling = sampling
        self._constraint = constraint
        self._chosen = chosen
        self._counts: Counter[int] = Counter()
        self._random = torch.Generator()
        if sampling.seed is not None:
            self._random.manual_seed(sampling.seed)
        else:
            self._random.seed()
        self._sets: list[Any] = []
        if sampling.top_k is not None:
            self._sets.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._sets.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """transformers' hook: scores `[1, vocabulary]` before the choice, and after it."""
        scores_V = self._weighed(scores[0].float())
        token = self._choose(input_ids, scores_V)
        if self._constraint is not None:
            self._constraint.accept(token)
        self._counts[token] += 1
        self._chosen(self._told(token, scores_V))
        only = torch.full_like(scores, float("-inf"))
        only[0, token] = 0.0
        return only

    def _weighed(self, scores_V: torch.Tensor) -> torch.Tensor:
        sampling = self._sampling
        changed = sampling.bias or (self._counts and (sampling.presence or sampling.frequency))
        if changed:
            scores_V = scores_V.clone()
        for token, bias in (sampling.bias or {}).items():
            scores_V[token] += bias
        if self._counts and (sampling.presence or sampling.frequency):
            seen = torch.tensor(list(self._counts), device=scores_V.device)
            counts = torch.tensor(list(self._counts.values()), dtype=scores_V.dtype, device=scores_V.device)
            scores_V[seen] -= sampling.presence + sampling.frequency * counts
        return self._constraint.mask(scores_V) if self._constraint is not None else scores_V

    def _choose(self, input_ids: torch.Tensor, scores_V: torch.Tensor) -> int:
        if self._sampling.temperature < COLD:
            return int(scores_V.argmax())
        scores_BV = (scores_V / self._sampling.temperature).unsqueeze(0)
        for narrow in self._sets:
            scores_BV = narrow(input_ids, scores_BV)
        # On the CPU, whatever the model is on: the same seed shall give the same text everywhere.
        chances = torch.softmax(scores_BV[0], dim=-1).cpu()
        return int(torch.multinomial(chances, 1, generator=self._random))

    def _told(self, token: int, scores_V: torch.Tensor) -> Chosen:
        count = self._sampling.top_logprobs
        if count is None:
            return Chosen(token)
        logprobs_V = torch.log_softmax(scores_V, dim=-1)
        best = torch.topk(logprobs_V, count) if count else None
        likeliest = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best is not None else ()
        return Chosen(token, float(logprobs_V[token]), likeliest)


class TextPieces:
    """Turns tokens into text piece by piece; what is given out is never taken back.

    Characters that several tokens share come out with the last of them.

    Args:
        tokenizer: the model's.
        prompt: its tokens.
        keep_special: show special tokens, which some models mark calls of tools with.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._tokens = self._context(list(prompt[1 - CONTEXT - CHARACTER :]))
        self._shown = len(self._tokens)
        """Of `_tokens`, those whose text has been given out, or came with the prompt."""

    def add(self, token: int) -> str:
        """The text that has become certain."""
        self._tokens.append(token)
        return self._new(at_end=len(self._tokens) - self._shown > PENDING)

    def end(self) -> str:
        """What is left."""
        return self._new(at_end=True)

    def _new(self, at_end: bool) -> str:
        before, after = self._decode(self._tokens[: self._shown]), self._decode(self._tokens)
        # A character whose bytes are not all there yet is decoded as U+FFFD.
        if not at_end and (after.endswith("\ufffd") or len(after) <= len(before)):
            return ""
        self._tokens = self._context(self._tokens)
        self._shown = len(self._tokens)
        return after[len(before) :]

    def _context(self, tokens: list[int]) -> list[int]:
        """The last tokens, from where a character begins: bytes that begin inside of one make decoders that look at
        neighbouring bytes together (SentencePiece's) take all of them for none."""
        lengths = range(CONTEXT, min(CONTEXT + CHARACTER - 1, len(tokens)) + 1)
        starts = (tokens[-length:] for length in lengths)
        return next((start for start in starts if not self._decode(start).startswith("\ufffd")), tokens[-CONTEXT:])

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=not self._keep_special, clean_up_tokenization_spaces=False
        )
        return text


@lru_cache(1 << 16)
def token_text(tokenizer: Any, token: int) -> tuple[str, tuple[int, ...] | None]:
    """One token as text and as bytes (None if these are not known), for those who look at log probabilities.

    The texts of all tokens of an answer, one behind the other, are the answer; so are the bytes of those that are only
    parts of a character, whose texts are U+FFFD.
    """
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    name: str = tokenizer.convert_ids_to_tokens(token) or ""
    if name.startswith("\u2581") and not text.startswith(" "):
        text = " " + text  # SentencePiece leaves it out where a text begins
    if "\ufffd" not in text:
        return text, tuple(text.encode())
    if byte := _BYTE.fullmatch(name):
        return text, (int(byte[1], 16),)
    known = [_LETTERS.get(letter) for letter in name]
    return text, tuple(byte for byte in known if byte is not None) if known and None not in known else None


_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""A byte among SentencePiece's tokens."""


def _letters() -> dict[str, int]:
    """How GPT-2 writes bytes in the names of tokens: those that can be printed as they are, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + count): byte for count, byte in enumerate(others)}


_LETTERS = _letters()
