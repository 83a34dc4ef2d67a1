"""What a client adds to the frozen blocks of the swarm, as the rest of the client sees it."""

from __future__ import annotations

from typing import Protocol

from swarm.protocol.adapters import BlockPart


class Adapter(Protocol):
    """Soft prompts and LoRA factors, by block. Its tensors may require gradients and be the result of other ones."""

    def part(self, block: int) -> BlockPart | None:
        """What is added to a block of the whole model, as it is now; None for nothing."""
