"""What servers are told of early exit when a session opens. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.client.early_exit.options import EarlyExit
from swarm.data_structures import Span
from swarm.errors import UsageError


@dataclass(frozen=True)
class ExitAgreement:
    """What a session has agreed on with its servers for all of its calls.

    Attributes:
        early_exits: whether servers may be asked to let tokens leave inside their spans, which is approximate.
        boundaries: blocks at which servers' spans are cut, ascending.
    """

    early_exits: bool = False
    boundaries: tuple[int, ...] = ()

    def including(self, options: EarlyExit, span: Span) -> ExitAgreement:
        """This agreement, extended by what a call with these options needs.

        Args:
            span: the blocks that servers compute.

        Raises:
            InvalidSpan: a boundary is not among them.
            UsageError: spans are to be cut, and servers are to let tokens leave inside them.
        """
        options.require_boundaries_in(span)
        inside = (block for block in options.boundaries if block > span.start)
        boundaries = tuple(sorted({*self.boundaries, *inside}))
        wanted = ExitAgreement(self.early_exits or options.fill == "project", boundaries)
        if wanted != self and wanted.early_exits and boundaries:
            raise UsageError(
                f"this session has boundaries={boundaries}, which do not go together with early_exit with "
                "fill='project'; use another session"
            )
        return wanted
