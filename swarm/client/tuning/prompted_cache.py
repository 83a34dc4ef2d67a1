"""The cache of a session whose sequences begin with virtual tokens."""

from __future__ import annotations

from typing import Any

import torch

from swarm.client.tuning.virtual_tokens import VirtualTokenLayout
from swarm.models.placeholder_cache import PlaceholderCache


class PromptedCache(PlaceholderCache):
    """The cache of a session whose sequences begin with virtual tokens.

    The caller's tokens and masks, and `generate`, know nothing of virtual tokens. `length` and everything else that
    belongs to the session counts them; what transformers asks outside the model does not.

    Args:
        session: as for `PlaceholderCache`.
        count: virtual tokens of each sequence.

    Attributes:
        is_inside: whether the model is running, which sees the virtual tokens.
        prompts: the embeddings of the virtual tokens at the first step. A session keeps them if training goes on.
    """

    def __init__(self, session: Any, count: int) -> None:
        super().__init__(session)
        self.count = count
        self.is_inside = False
        self.prompts: torch.Tensor | None = None
        self._leads: torch.Tensor | None = None

    @property
    def token_layout(self) -> VirtualTokenLayout | None:
        """Where the virtual tokens stand; None before the step that brings them."""
        return VirtualTokenLayout(self.count, self._leads) if self._leads is not None and self.length else None

    def set_token_layout(self, layout: VirtualTokenLayout) -> None:
        """Store the layout for the step that brings the virtual tokens."""
        self._leads = layout.leads

    def set_length(self, length: int) -> None:
        """Roll back as any cache does; rolling back into the virtual tokens rolls back to 0."""
        if self._leads is not None and length < int(self._leads.max()) + self.count:
            length = min(length, 0)
        super().set_length(length)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length if self.is_inside else max(0, self.length - self.count)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def _select(self, rows: list[int]) -> None:
        super()._select(rows)
        if self._leads is not None:
            self._leads = self._leads[torch.tensor(rows)]
