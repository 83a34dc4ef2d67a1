"""A request in the engine, from its coming to its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarm.models.execution.session_cache import StepComputation
from swarm.server.compute.compute_request import BackwardWork, ComputeResult, ForwardWork
from swarm.server.compute.scheduler import MAX_SHORT_TOKENS, QueuedTokens

BACKWARD_TOKEN_COST = 3
"""What a token costs in a backward: a forward that is computed again, and about two of them back."""


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits or is being computed.

    Attributes:
        came, served: when it came, and when it was last served or came.
        work: once it has begun.
        seconds: spent in the blocks so far.
    """

    number: int
    request: ForwardWork | BackwardWork
    future: asyncio.Future[ComputeResult]
    loop: asyncio.AbstractEventLoop
    came: float
    served: float
    work: StepComputation | None = None
    seconds: float = 0.0

    @property
    def short(self) -> bool:
        return not self.whole and max(self.request.layout.counts) <= MAX_SHORT_TOKENS

    @property
    def whole(self) -> bool:
        return isinstance(self.request, BackwardWork)

    @property
    def left(self) -> int:
        """Tokens to compute, or what costs as much as so many."""
        tokens = self.work.tokens_left if self.work is not None else self.request.layout.tokens
        return tokens * BACKWARD_TOKEN_COST if self.whole else tokens

    def waiting(self, now: float, trained: float) -> QueuedTokens:
        """As the scheduler sees it, if training was last served at `trained`."""
        request = self.request
        return QueuedTokens(
            number=self.number,
            span=request.span,
            peer=request.peer,
            session=request.session,
            tokens=self.left,
            short=self.short,
            whole=self.whole,
            training=request.training,
            idle=now - (max(self.served, trained) if request.training else self.served),
            waited=now - self.served,
        )

    def portion(self, tokens: int) -> tuple[str, int, int]:
        """So many of its tokens, as `swarm.metrics.server.ServerObserver` is told of them."""
        return self.request.kind, self.request.layout.sequences, tokens
