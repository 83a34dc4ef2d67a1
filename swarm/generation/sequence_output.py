"""From the tokens of one sequence to its output: text, thoughts and tool calls, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarm.generation.detokenizer import IncrementalDetokenizer
from swarm.generation.formats.tool_calls import ToolCall
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_request import SequenceRequest
from swarm.generation.stop_sequences import StopSequenceFilter


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
        self.stopped = self._stop_filter.hit
        delta = self._separate(text)
        self.stopped = self.stopped or bool(delta.calls and self._tools is not None and self._tools.single_call)
        return self._with_tokens(delta) if delta.text or delta.calls or delta.thought else None

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
        self.stopped = self._stop_filter.hit
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
