"""The model's head, computed once for several lanes.

The head is the largest matrix that a client reads for each token: more than a gigabyte in models with a large
vocabulary. Lanes that are ready at the same time read it once for all their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from swarm.client.threads.compute_lock import current_ticket


def share_head(head: nn.Module) -> None:
    """Patch `head` so that lanes that are ready at the same time compute it in one batch.

    Only inputs of one sequence and one token, `[1, 1, width]`, are batched.
    """
    compute_alone = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if has_torch_function_unary(hidden):  # what records torch's calls sees this one
            return handle_torch_function(forward, (hidden,), hidden)  # type: ignore[no-any-return]
        ticket = current_ticket()
        if ticket is None or torch.is_grad_enabled() or hidden.shape[:-1] != (1, 1):
            return compute_alone(hidden)  # type: ignore[no-any-return]
        return ticket.compute_batched(hidden, compute_together)

    def compute_together(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        if len(inputs) == 1:
            return [compute_alone(inputs[0])]
        return compute_alone(torch.cat(inputs)).split(1)  # type: ignore[no-any-return]

    head.forward = forward  # type: ignore[method-assign]
