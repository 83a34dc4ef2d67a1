"""From tokens to text: piece by piece while a sequence is generated, and token by token for log probabilities."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

CONTEXT_TOKENS = 6
"""Earlier tokens that a new one is at least decoded with: some tokenizers join words depending on what comes before."""

MAX_CHARACTER_TOKENS = 4
"""Tokens that one character may have: one for each of its bytes in UTF-8."""

MAX_PENDING_TOKENS = 12
"""Tokens that may wait for the rest of a character; then they are shown as they are."""

MAX_CACHED_TOKEN_TEXTS = 1 << 16

REPLACEMENT = "\ufffd"
"""What an incomplete character is decoded as."""


class IncrementalDetokenizer:
    """Turns tokens into text piece by piece. Text that was returned never changes.

    A character that consists of several tokens is returned with the last of them.

    Args:
        tokenizer: the model's.
        prompt: the tokens before the first new one.
        keep_special: keep special tokens, which some models mark tool calls with.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), keep_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._keep_special = keep_special
        self._tokens = self._context(list(prompt[1 - CONTEXT_TOKENS - MAX_CHARACTER_TOKENS :]))
        self._shown = len(self._tokens)
        """How many of `_tokens` belong to the prompt, or their text has been returned."""

    def add_token(self, token: int) -> str:
        """Add a token, and return the text that is now certain."""
        self._tokens.append(token)
        return self._new_text(at_end=len(self._tokens) - self._shown > MAX_PENDING_TOKENS)

    def finish(self) -> str:
        """The text that was held back."""
        return self._new_text(at_end=True)

    def preview(self, tokens: Sequence[int]) -> str:
        """The text that would follow what was returned if these tokens came next; nothing is added."""
        before, after = self._decode(self._tokens[: self._shown]), self._decode([*self._tokens, *tokens])
        return after[len(before) :].rstrip(REPLACEMENT)

    def _new_text(self, at_end: bool) -> str:
        before, after = self._decode(self._tokens[: self._shown]), self._decode(self._tokens)
        # The bytes of the last character may not all be there yet.
        if not at_end and (after.endswith(REPLACEMENT) or len(after) <= len(before)):
            return ""
        self._tokens = self._context(self._tokens)
        self._shown = len(self._tokens)
        return after[len(before) :]

    def _context(self, tokens: list[int]) -> list[int]:
        """The last tokens, starting at the beginning of a character.

        Decoders that look at neighboring bytes together (SentencePiece's) decode none of them if the first ones belong
        to an incomplete character.
        """
        lengths = range(CONTEXT_TOKENS, min(CONTEXT_TOKENS + MAX_CHARACTER_TOKENS - 1, len(tokens)) + 1)
        starts = (tokens[-length:] for length in lengths)
        whole = (start for start in starts if not self._decode(start).startswith(REPLACEMENT))
        return next(whole, tokens[-CONTEXT_TOKENS:])

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            tokens, skip_special_tokens=not self._keep_special, clean_up_tokenization_spaces=False
        )
        return text


@lru_cache(MAX_CACHED_TOKEN_TEXTS)
def token_text(tokenizer: Any, token: int) -> tuple[str, tuple[int, ...] | None]:
    """One token as text and as bytes (None if the bytes are not known), for log probabilities.

    The texts of all tokens of an answer, joined, are the answer. So are the bytes of tokens that are only a part of a
    character, whose texts are U+FFFD.
    """
    text: str = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    name: str = tokenizer.convert_ids_to_tokens(token) or ""
    if name.startswith("\u2581") and not text.startswith(" "):
        text = " " + text  # SentencePiece drops it at the beginning of a text
    if REPLACEMENT not in text:
        return text, tuple(text.encode())
    if byte := _SENTENCEPIECE_BYTE.fullmatch(name):
        return text, (int(byte[1], 16),)
    known = [_GPT2_BYTES.get(letter) for letter in name]
    return text, tuple(byte for byte in known if byte is not None) if known and None not in known else None


_SENTENCEPIECE_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
"""The name of a SentencePiece token for a single byte."""


def _gpt2_bytes() -> dict[str, int]:
    """How GPT-2 writes bytes in the names of tokens: printable ones as they are, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + count): byte for count, byte in enumerate(others)}


_GPT2_BYTES = _gpt2_bytes()
