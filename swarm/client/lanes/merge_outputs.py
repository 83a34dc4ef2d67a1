"""The outputs of the lanes of one `generate` call, merged into what a single call would have returned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swarm.client.lanes.split_arguments import LanePlan


def merge_outputs(outputs: Sequence[Any], parts: Sequence[slice], plan: LanePlan) -> Any:
    """One output for all lanes, with the sequences in their original order.

    Shorter sequences are padded as transformers pads a text that has ended. Scores after the end of a lane give all
    weight to the padding. `past_key_values` is None: the lanes' caches are gone.

    Args:
        outputs: of each lane: token ids `[sequences, length]`, or what transformers returns with
            `return_dict_in_generate`.
        parts: which sequences of the batch each lane has.
        plan: what the lanes have in common.
    """
    if isinstance(outputs[0], torch.Tensor):
        return _concatenate(outputs, plan.fill_token)
    fields: dict[str, Any] = {"sequences": _concatenate([one.sequences for one in outputs], plan.fill_token)}
    for name in ("scores", "logits"):
        if outputs[0].get(name) is not None:
            fields[name] = _merge_steps([one[name] for one in outputs], plan.fill_token)
    if outputs[0].get("sequences_scores") is not None:
        fields["sequences_scores"] = torch.cat([one["sequences_scores"] for one in outputs])
    if outputs[0].get("beam_indices") is not None:
        fields["beam_indices"] = _concatenate(
            [
                _shift_beam_indices(one["beam_indices"], part.start * plan.num_beams)
                for one, part in zip(outputs, parts, strict=True)
            ],
            -1,
        )
    return type(outputs[0])(**fields)


def _concatenate(outputs: Sequence[torch.Tensor], fill: int | None) -> torch.Tensor:
    """Concatenate `[sequences, length]` of all lanes, padded to the longest."""
    length = max(output.shape[1] for output in outputs)
    return torch.cat([_pad(output, length, fill) if output.shape[1] < length else output for output in outputs])


def _pad(output: torch.Tensor, length: int, fill: int | None) -> torch.Tensor:
    assert fill is not None, "plan_lanes refuses lanes of different lengths without a fill token"
    return torch.cat([output, output.new_full((output.shape[0], length - output.shape[1]), fill)], dim=1)


def _merge_steps(lanes: Sequence[tuple[torch.Tensor, ...]], fill: int | None) -> tuple[torch.Tensor, ...]:
    """The scores `[sequences, vocabulary]` of each step, of all lanes."""
    steps = max(len(lane) for lane in lanes)
    return tuple(
        torch.cat([lane[step] if step < len(lane) else _scores_after_end(lane[0], fill) for lane in lanes])
        for step in range(steps)
    )


def _scores_after_end(like: torch.Tensor, fill: int | None) -> torch.Tensor:
    scores = torch.full_like(like, -torch.inf)
    if fill is not None and fill >= 0:
        scores[:, fill] = 0
    return scores


def _shift_beam_indices(indices: torch.Tensor, first: int) -> torch.Tensor:
    """Beam indices count the beams of the whole batch; -1 follows the end of a text."""
    return torch.where(indices >= 0, indices + first, indices)
