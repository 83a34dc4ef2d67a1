"""What one server was given in a session and what it gave, taken from the histories that a failover needs anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from swarm.client.hops.input_history import InputHistory
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import Hop, StepLayout

if TYPE_CHECKING:
    from swarm.client.hops.hop_session import HopSession, SessionContext


@dataclass(frozen=True)
class SamplePart:
    """Successive tokens of some sequences, whole sequences in the end.

    Attributes:
        inputs, outputs: of the server, for the same tokens.
    """

    layout: StepLayout
    inputs: PackedHidden
    outputs: PackedHidden


@dataclass(frozen=True)
class WorkSample:
    """One server's part of one session.

    Attributes:
        hop: the server as it was announced, and its blocks.
        context: the constants of the session.
        parts: its tokens, from the first on.
        own_from: position from which the outputs are this server's, in all sequences: before, another one had its
            place.
    """

    hop: Hop
    context: SessionContext
    parts: tuple[SamplePart, ...]
    own_from: int

    @property
    def tokens(self) -> int:
        """How many tokens have to be computed again."""
        return sum(part.layout.tokens for part in self.parts)


class SampleTaker(Protocol):
    """Decides which work is looked at again, and does it."""

    def wants(self, hop: Hop) -> bool:
        """Whether a sample of a server's work should be taken now. Another call may have another answer."""

    def take(self, sample: WorkSample) -> None:
        """Look at a sample, later."""


def offer_sample(
    context: SessionContext, hops: Sequence[HopSession], index: int, final: InputHistory, done: int
) -> None:
    """Have the work of `hops[index]` up to step `done` looked at, if that is wanted.

    Args:
        final: the outputs of the last hop.
    """
    hop = hops[index]
    # Where tokens leave inside spans, results depend on more than the inputs.
    if context.samples is None or context.early_exits or not context.samples.wants(hop.hop):
        return
    if (sample := _sample(context, hops, index, final, done)) is not None:
        context.samples.take(sample)


def _sample(
    context: SessionContext, hops: Sequence[HopSession], index: int, final: InputHistory, done: int
) -> WorkSample | None:
    """A server's work; None if it has done nothing that this client knows."""
    hop = hops[index]
    behind = hops[index + 1].history if index + 1 < len(hops) else final
    if done < 0 or behind.last < done:
        return None
    inputs, outputs = list(hop.history.replay(done)), list(behind.replay(done))
    if [layout for layout, _ in inputs] != [layout for layout, _ in outputs]:
        return None
    parts = tuple(SamplePart(layout, given, gave) for (layout, given), (_, gave) in zip(inputs, outputs, strict=True))
    if not any(max(part.layout.lengths) > hop.filled_to for part in parts):
        return None
    return WorkSample(hop.hop, context, parts, hop.filled_to)
