"""A request in the engine, from its arrival to its answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swarm.models.execution.session_cache import StepComputation
from swarm.server.compute.compute_request import BackwardWork, ComputeResult, ForwardWork
from swarm.server.compute.scheduler import MAX_SHORT_TOKENS, QueuedTokens

BACKWARD_TOKEN_COST = 3
"""Cost of a token in a backward, in forward tokens: the forward once more, and about two of them for the gradients."""


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits or is being computed.

    Attributes:
        number: smaller ones came earlier.
        future: gets the result, in `loop`.
        arrived_at: when it came.
        served_at: when it was last part of an iteration; until then, when it came.
        computation: once it has started.
        compute_seconds: time spent in the blocks so far.
    """

    number: int
    request: ForwardWork | BackwardWork
    future: asyncio.Future[ComputeResult]
    loop: asyncio.AbstractEventLoop
    arrived_at: float
    served_at: float
    computation: StepComputation | None = None
    compute_seconds: float = 0.0

    @property
    def is_short(self) -> bool:
        """A decode step rather than a prompt."""
        return not self.is_whole and max(self.request.layout.counts) <= MAX_SHORT_TOKENS

    @property
    def is_urgent(self) -> bool:
        """A client waits for it, or it has begun: it lets others go first only once."""
        return self.request.urgent or self.computation is not None

    @property
    def is_whole(self) -> bool:
        """Computed in one piece, alone."""
        return isinstance(self.request, BackwardWork)

    @property
    def tokens_left(self) -> int:
        """Tokens to compute, or the number of tokens that cost as much."""
        tokens = self.computation.tokens_left if self.computation is not None else self.request.layout.tokens
        return tokens * BACKWARD_TOKEN_COST if self.is_whole else tokens

    def for_scheduler(self, now: float, trained_at: float) -> QueuedTokens:
        """What the scheduler needs to know, where `trained_at` is when any training was last served."""
        request = self.request
        return QueuedTokens(
            number=self.number,
            span=request.span,
            peer=request.peer,
            session=request.session,
            tokens=self.tokens_left,
            short=self.is_short,
            whole=self.is_whole,
            training=request.training,
            idle=now - (max(self.served_at, trained_at) if request.training else self.served_at),
            waited=now - self.served_at,
            urgent=self.is_urgent,
            joins_parts=request.joins_parts,
            token_cost=request.token_cost,
        )

    def for_observer(self, tokens: int) -> tuple[str, int, int]:
        """What `swarm.metrics.server.ServerObserver` is told of this many of its tokens."""
        return self.request.kind, self.request.layout.sequences, tokens
