"""Answers as blocks, as Anthropic's Messages and OpenAI's Responses have them: thoughts, texts and tool calls."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from swarm.gateway.openai.dialect import StreamEvent
from swarm.gateway.openai.response_writers import AccumulatedAnswer, ResponseWriter, new_id
from swarm.generation.sampling import SampledToken
from swarm.generation.sequence_generation import SequenceEnd
from swarm.generation.sequence_group import Usage
from swarm.generation.sequence_output import SequenceDelta

BlockKind = Literal["thought", "text", "call"]


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        content: the thought, the text, or the call's arguments, so far.
        name: the function that is called; empty in other blocks.
        is_whole: whether it ended by itself, rather than being cut off.
        logprobs: of a text's tokens as clients get them, if they are asked for.
    """

    kind: BlockKind
    id: str
    index: int
    content: str = ""
    name: str = ""
    is_whole: bool = True
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class BlockWriter(ResponseWriter):
    """Writes a single answer as blocks, one after the other.

    Attributes:
        blocks: of the answer so far.
        end: why it ended; None as long as it has not.
    """

    id_prefixes: ClassVar[dict[BlockKind, str]]

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.end: SequenceEnd | None = None
        self._open: Block | None = None
        self._blanks = SequenceDelta("")  # in front of a text, which may turn out to be none

    def body(self, answers: Sequence[AccumulatedAnswer], usage: Usage) -> dict[str, Any]:
        (answer,) = answers
        deque(self.delta_events(0, answer.as_delta(), AccumulatedAnswer()), maxlen=0)
        if answer.end is not None:
            deque(self.end_events(0, answer.end), maxlen=0)
        return self.object(usage)

    def delta_events(self, index: int, delta: SequenceDelta, before: AccumulatedAnswer) -> Iterable[StreamEvent]:
        if delta.thought:
            yield from self._grow("thought", delta.thought)
        if delta.text:
            self._blanks += SequenceDelta(delta.text, tokens=delta.tokens)
            if not self._blanks.text.isspace() or (self._open is not None and self._open.kind == "text"):
                yield from self._grow_text()
        for call in delta.calls:
            self._blanks = SequenceDelta("")
            yield from self._grow("call", call.arguments, call.name)

    def end_events(self, index: int, end: SequenceEnd) -> Iterable[StreamEvent]:
        self.end = end
        if not self.blocks:
            yield from self._grow_text()  # an answer has at least one block
        if self._open is not None:
            self._open.is_whole = end.reason != "length"
            yield from self.block_end(self._open)
            self._open = None

    @abstractmethod
    def object(self, usage: Usage) -> dict[str, Any]:
        """The response as far as it goes."""

    @abstractmethod
    def block_start(self, block: Block) -> Iterable[StreamEvent]:
        """What begins a block, which is empty yet."""

    @abstractmethod
    def block_delta(self, block: Block, more: str, tokens: Sequence[SampledToken]) -> Iterable[StreamEvent]:
        """What is added to a block: to its content, and of a text its tokens if log probabilities are asked for."""

    @abstractmethod
    def block_end(self, block: Block) -> Iterable[StreamEvent]:
        """What ends a block."""

    def _grow_text(self) -> Iterable[StreamEvent]:
        text, self._blanks = self._blanks, SequenceDelta("")
        yield from self._grow("text", text.text, tokens=text.tokens)

    def _grow(
        self, kind: BlockKind, more: str, name: str = "", tokens: Sequence[SampledToken] = ()
    ) -> Iterable[StreamEvent]:
        if self._open is None or self._open.kind != kind or kind == "call":
            if self._open is not None:
                yield from self.block_end(self._open)
            self._open = Block(kind, new_id(self.id_prefixes[kind]), len(self.blocks), name=name)
            self.blocks.append(self._open)
            yield from self.block_start(self._open)
        self._open.content += more
        yield from self.block_delta(self._open, more, tokens)


def typed_event(kind: str, **fields: Any) -> StreamEvent:
    """An event whose name is also the `type` of its object."""
    return StreamEvent({"type": kind, **fields}, kind)
