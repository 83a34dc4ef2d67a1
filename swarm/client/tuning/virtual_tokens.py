"""The virtual tokens of prompt tuning (Lester et al. 2021): where they stand, and the cache of a session with them.

They stand right before the first real token of each sequence, after any padding on the left, so that padding does not
change a sequence. (PEFT puts them before the padding, which is the same for sequences without padding on the left.)
Virtual slots count in the mask, in positions and in labels; the outputs of the model leave them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from swarm.models.placeholder_cache import PlaceholderCache

IGNORED_LABEL = -100
"""The label of slots that do not count in the loss."""


@dataclass(frozen=True, eq=False)
class VirtualTokenLayout:
    """Where `count` virtual tokens stand in a batch `[sequences, slots]`, which becomes `[sequences, count + slots]`.

    Attributes:
        count: number of virtual tokens.
        leads: slots of padding before the first real token of each sequence, int `[sequences]`.
    """

    count: int
    leads: torch.Tensor

    def insert(self, values: torch.Tensor, virtual: torch.Tensor) -> torch.Tensor:
        """The values of all slots, with those of the virtual tokens inserted.

        Args:
            values: `[sequences, slots]` or `[sequences, slots, width]`.
            virtual: values of the virtual tokens, `[count]` or `[sequences, count]`, or with a width as `values`.
        """
        sequences, slots = values.shape[:2]
        virtual = virtual.to(values.device, values.dtype).expand(sequences, self.count, *values.shape[2:])
        joined = torch.cat([virtual, values], dim=1)
        if not self.leads.any():  # the usual case: nothing to gather, and a simpler graph for gradients
            return joined
        # Each slot's distance from the sequence's first virtual token.
        offsets = (torch.arange(self.count + slots) - self.leads.cpu()[:, None]).to(values.device)
        unmoved = torch.arange(self.count + slots, device=values.device).expand(sequences, -1)
        source = torch.where(offsets < 0, unmoved + self.count, torch.where(offsets < self.count, offsets, unmoved))
        index = source if values.ndim == 2 else source[..., None].expand(-1, -1, values.shape[2])
        return joined.gather(1, index)

    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        """The position ids of a first step `[sequences or 1, slots]`, with those of the virtual tokens inserted.

        The first virtual token of each sequence gets the position of its first real token, and so on.
        """
        sequences, slots = len(self.leads), positions.shape[1]
        positions = positions.expand(sequences, -1)
        leads = self.leads.to(positions.device)[:, None]
        first = positions.gather(1, leads.clamp(max=slots - 1))
        moved = positions + self.count * (torch.arange(slots, device=positions.device) >= leads)
        return self.insert(moved, first + torch.arange(self.count, device=positions.device))

    def labels(self, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The labels `[sequences, slots]` of a causal language model; virtual tokens and padding do not count."""
        if mask is not None:
            labels = labels.masked_fill(mask.to(labels.device) == 0, IGNORED_LABEL)
        return self.insert(labels, labels.new_full((self.count,), IGNORED_LABEL))


def virtual_token_layout(count: int, sequences: int, mask: torch.Tensor | None) -> VirtualTokenLayout:
    """Where `count` virtual tokens stand in a batch.

    Args:
        mask: attention mask `[sequences, slots]`, or None if no slot is padding.
    """
    if mask is None:
        return VirtualTokenLayout(count, torch.zeros(sequences, dtype=torch.long))
    return VirtualTokenLayout(count, (mask.cpu() != 0).long().cumsum(1).eq(0).sum(1))


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
