"""From the tokens of one sequence to its output: text, thoughts and tool calls, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from swarm.generation.formats.thinking import partial_length
from swarm.generation.formats.tool_calls import ToolCall
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_request import SequenceRequest

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


class StopSequenceFilter:
    """Passes text on until one of the stop sequences occurs. The stop sequence itself is not passed on.

    Args:
        stops: texts that are not empty.

    Attributes:
        hit: the stop sequence that has occurred; None if none has.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """Add text, and return what may be shown now. What may be the beginning of a stop sequence is held back."""
        if self.hit is not None or not self._stops:
            return text if self.hit is None else ""
        text = self._held + text
        # The one that ends first, so that the result does not depend on how the text is divided into pieces.
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.hit = min(found)
            self._held = ""
            return text[:at]
        held = partial_length(text, self._stops)
        shown, self._held = text[: len(text) - held], text[len(text) - held :]
        return shown

    def preview(self, text: str) -> str:
        """The text that would be shown in the end if `text` came next; nothing is added."""
        copy = StopSequenceFilter(self._stops)
        copy.hit, copy._held = self.hit, self._held
        return copy.feed(text) + copy.finish()

    def finish(self) -> str:
        """The text that was held back and is not a stop sequence."""
        held, self._held = self._held, ""
        return held


@dataclass(frozen=True)
class SequenceDelta:
    """New output: thoughts, text, tool calls, and the tokens since the last delta; the first may have the prompt's."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    tokens: tuple[SampledToken, ...] = ()
    thought: str = ""
    prompt: tuple[SampledToken, ...] = ()

    def __add__(self, other: SequenceDelta) -> SequenceDelta:
        """Both, one after the other."""
        return SequenceDelta(
            self.text + other.text,
            self.calls + other.calls,
            self.tokens + other.tokens,
            self.thought + other.thought,
            self.prompt + other.prompt,
        )


class SequenceOutput:
    """Turns tokens into deltas: whole characters, up to a stop sequence, with thoughts and tool calls separated.

    Attributes:
        stopped: a stop sequence has occurred, or the only call that is wanted.
        has_calls: a tool was called.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, request: SequenceRequest) -> None:
        self.stopped = False
        self.has_calls = False
        self._detokenizer = detokenizer
        self._stop_filter = StopSequenceFilter(request.stops)
        self._tools = request.tools
        self._thinking = request.thinking
        self._keeps_tokens = request.top_logprobs is not None
        self._keeps_end = request.scores_prompt
        self._tokens: list[SampledToken] = []

    def add_token(self, sampled: SampledToken, is_end: bool) -> SequenceDelta | None:
        """Add the next token, and return the output that is now certain; None if there is none."""
        if self._keeps_tokens and (not is_end or self._keeps_end):
            self._tokens.append(sampled)
        text = self._stop_filter.feed("" if is_end else self._detokenizer.add_token(sampled.token))
        self.stopped = self.stop is not None
        delta = self._separate(text)
        self.stopped = self.stopped or bool(delta.calls and self._tools is not None and self._tools.single_call)
        return self._with_tokens(delta) if delta.text or delta.calls or delta.thought else None

    @property
    def stop(self) -> str | None:
        """The stop sequence that has ended the text."""
        return self._stop_filter.hit

    @property
    def is_thinking(self) -> bool:
        """Whether the text is inside of a thought."""
        return self._thinking is not None and self._thinking.is_inside

    @property
    def is_cut(self) -> bool:
        """Whether the last call is not complete."""
        return self._tools is not None and self._tools.is_cut

    def preview(self, tokens: Sequence[int]) -> str:
        """The text that these tokens would add; none where it may become a tool call or a thought."""
        if self._tools is not None or self._thinking is not None or not tokens:
            return ""
        return self._stop_filter.preview(self._detokenizer.preview(tokens))

    def finish(self) -> SequenceDelta:
        """The output that was held back."""
        text = "" if self.stopped else self._stop_filter.feed(self._detokenizer.finish()) + self._stop_filter.finish()
        self.stopped = self.stop is not None
        return self._with_tokens(self._separate(text, is_end=True))

    def _separate(self, text: str, is_end: bool = False) -> SequenceDelta:
        """The next text of the answer, by what it is."""
        thought = ""
        calls: list[ToolCall] = []
        if self._thinking is not None:
            thought, text = self._thinking.feed(text)
            if is_end:
                more_thought, more = self._thinking.finish()
                thought, text = thought + more_thought, text + more
        if self._tools is not None:
            text, calls = self._tools.feed(text)
            if is_end:
                rest, more_calls = self._tools.finish()
                text, calls = text + rest, calls + more_calls
        return SequenceDelta(text, tuple(calls), thought=thought)

    def _with_tokens(self, delta: SequenceDelta) -> SequenceDelta:
        """The delta with the tokens since the last one."""
        self.has_calls = self.has_calls or bool(delta.calls)
        tokens, self._tokens = tuple(self._tokens), []
        return replace(delta, tokens=tokens)
