"""The head's product for several lanes at once.

A head is the largest matrix that a client reads for a token, more than a gigabyte in models of large vocabularies.
Lanes that are ready at the same time read it once, for all their rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from swarm.client.threads.compute_lock import current_ticket


def share_head(head: nn.Module) -> None:
    """Let lanes that are ready at the same time compute `head` together, where each has one row, `[1, 1, width]`."""
    alone = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        turn = current_ticket()
        if turn is None or torch.is_grad_enabled() or hidden.shape[:-1] != (1, 1):
            return alone(hidden)  # type: ignore[no-any-return]
        return turn.together(hidden, together)

    def together(rows: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(rows) == 1:
            return [alone(rows[0])]
        return alone(torch.cat(rows)).split(1)  # type: ignore[no-any-return]

    head.forward = forward  # type: ignore[method-assign]
