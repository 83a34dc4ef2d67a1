"""Where the virtual tokens of prompt tuning stand in a batch (Lester et al. 2021).

They stand right in front of each row's first real token, behind padding on the left: a row is then the same whether it
is padded or alone. (PEFT puts them in front of the padding, which is the same for rows without padding on the left.)
Virtual slots take part in the mask, in positions and in labels; what the model returns leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

IGNORED_LABEL = -100
"""The label that counts nothing."""


@dataclass(frozen=True, eq=False)
class VirtualTokenLayout:
    """Where `count` virtual tokens go in a batch `[rows, slots]`, which becomes `[rows, count + slots]`.

    Attributes:
        leads: slots of padding in front of each row's first real token, int `[rows]`.
    """

    count: int
    leads: torch.Tensor

    def is_virtual(self, slots: int) -> torch.Tensor:
        """Which of the `count + slots` are virtual, bool `[rows, count + slots]`."""
        place = self._offsets(slots)
        return (place >= 0) & (place < self.count)

    def extended(self, values: torch.Tensor, virtual: torch.Tensor) -> torch.Tensor:
        """Values of all slots.

        Args:
            values: `[rows, slots]` or `[rows, slots, width]`.
            virtual: of the virtual tokens, `[count]` or `[rows, count]`, or with a width as `values`.
        """
        rows, slots = values.shape[:2]
        if not self.leads.any():  # as nearly always: no gathering, and a shorter way back for gradients
            return torch.cat([self._of_rows(virtual, values), values], dim=1)
        place = self._offsets(slots).to(values.device)
        everything = torch.cat([self._of_rows(virtual, values), values], dim=1)
        before = torch.arange(self.count + slots, device=values.device).expand(rows, -1)
        source = torch.where(place < 0, before + self.count, torch.where(place < self.count, place, before))
        index = source if values.ndim == 2 else source[..., None].expand(-1, -1, values.shape[2])
        return everything.gather(1, index)

    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Position ids `[rows or 1, slots]` of a first step, with those of the virtual tokens: each row counts on from
        what its first real token had."""
        rows, slots = len(self.leads), positions.shape[1]
        positions = positions.expand(rows, -1)
        leads = self.leads.to(positions.device)[:, None]
        first = positions.gather(1, leads.clamp(max=slots - 1))
        moved = positions + self.count * (torch.arange(slots, device=positions.device) >= leads)
        return self.extended(moved, first + torch.arange(self.count, device=positions.device))

    def labels(self, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Labels `[rows, slots]` of a causal language model; virtual tokens and padding count nothing."""
        if mask is not None:
            labels = labels.masked_fill(mask.to(labels.device) == 0, IGNORED_LABEL)
        return self.extended(labels, labels.new_full((self.count,), IGNORED_LABEL))

    def _offsets(self, slots: int) -> torch.Tensor:
        """How far each slot is behind the row's first virtual token, `[rows, count + slots]`."""
        return torch.arange(self.count + slots) - self.leads.cpu()[:, None]

    def _of_rows(self, virtual: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return virtual.to(values.device, values.dtype).expand(len(values), self.count, *values.shape[2:])


def virtual_token_layout(count: int, rows: int, mask: torch.Tensor | None) -> VirtualTokenLayout:
    """Where `count` virtual tokens go.

    Args:
        mask: attention mask `[rows, slots]`, or None if nothing is padded.
    """
    if mask is None:
        return VirtualTokenLayout(count, torch.zeros(rows, dtype=torch.long))
    return VirtualTokenLayout(count, (mask.cpu() != 0).long().cumsum(1).eq(0).sum(1))
