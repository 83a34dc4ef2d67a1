"""What this client makes of hidden states on their way: logits through lenses, and how sure a token is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from swarm.client.early_exit.options import EarlyExit
from swarm.models.exits.confidence import softmax_response, state_similarity
from swarm.models.exits.trained_exits import TrainedExits


class HiddenReader:
    """Reads the hidden states of one `generate` call.

    Args:
        options: when tokens leave.
        exits: lenses and classifiers, for the boundaries that have some.
        head: hidden states `[R, 1, H]` behind the last block, or as if they were, to logits `[R, V]`.
    """

    def __init__(self, options: EarlyExit, exits: TrainedExits, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._options, self._exits, self._head = options, exits, head

    def logits(self, hidden_R1H: torch.Tensor, blocks_R: Sequence[int]) -> torch.Tensor:
        """The logits `[R, V]` of hidden states in front of a block of each sequence, through its lens if there is one.

        The number of the model's blocks stands for behind the last one.
        """
        read_R1H = hidden_R1H
        for block in set(blocks_R):
            lens = self._exits.lenses.get(block)
            if lens is not None:
                there_R11 = torch.tensor([one == block for one in blocks_R], device=hidden_R1H.device).view(-1, 1, 1)
                read_R1H = torch.where(there_R11, lens(hidden_R1H), read_R1H)
        return self._head(read_R1H)

    def confidence(
        self, block: int, before_RH: torch.Tensor, hidden_R1H: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """How sure tokens in front of `block` are `[R]`, and their logits `[R, V]` if these had to be computed.

        Without a classifier for this block, they are not sure.

        Args:
            before_RH: hidden states where these tokens were looked at before.
        """
        match self._options.confidence:
            case "similarity":
                return state_similarity(before_RH, hidden_R1H[:, -1]), None
            case "classifier":
                return self._classified(block, hidden_R1H[:, -1]), None
        logits_RV = self.logits(hidden_R1H, [block] * len(hidden_R1H))
        return softmax_response(logits_RV), logits_RV

    def _classified(self, block: int, hidden_RH: torch.Tensor) -> torch.Tensor:
        classifier = self._exits.classifiers.get(block)
        return classifier(hidden_RH) if classifier is not None else torch.zeros(len(hidden_RH), device=hidden_RH.device)
