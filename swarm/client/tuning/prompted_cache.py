"""The cache of a session whose rows begin with virtual tokens."""

from __future__ import annotations

from typing import Any

import torch

from swarm.client.tuning.virtual_tokens import VirtualTokenLayout
from swarm.models.placeholder_cache import PlaceholderCache


class PromptedCache(PlaceholderCache):
    """Rows that begin with virtual tokens, of which the caller's tokens, masks and `generate` know nothing.

    `length` and whatever else belongs to the session counts them; what transformers asks outside of the model does not.

    Args:
        session: as for `PlaceholderCache`.
        count: virtual tokens of a row.

    Attributes:
        is_inside: whether the model is asking, which sees the virtual tokens.
        prompts: the virtual tokens' embeddings as they were at the first step. A session goes on with what it began
            with, also if training goes on meanwhile.
    """

    def __init__(self, session: Any, count: int) -> None:
        super().__init__(session)
        self.count = count
        self.is_inside = False
        self.prompts: torch.Tensor | None = None
        self._leads: torch.Tensor | None = None

    @property
    def placement(self) -> VirtualTokenLayout | None:
        """Where the virtual tokens stand, once they do."""
        return VirtualTokenLayout(self.count, self._leads) if self._leads is not None and self.length else None

    def place(self, placement: VirtualTokenLayout) -> None:
        """The step that comes brings the virtual tokens."""
        self._leads = placement.leads

    def set_length(self, length: int) -> None:
        """As for any cache; virtual tokens are kept all or none, so further back than these is the beginning."""
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
