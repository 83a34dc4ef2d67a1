"""What the lanes of one `generate` have written, as that one `generate` would have returned it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swarm.client.lanes.split_arguments import LanePlan


def merge_outputs(outputs: Sequence[Any], rows: Sequence[slice], made: LanePlan) -> Any:
    """One result out of one a lane, rows in order.

    Args:
        outputs: token ids `[sequences, length]`, or what transformers returns with `return_dict_in_generate`.
        rows: of the batch, that each lane has.

    Shorter sequences are filled up as transformers fills up a text that has ended. Scores of a lane that has ended give
    all weight to that filling. `past_key_values` is None: the lanes' caches are gone.
    """
    if isinstance(outputs[0], torch.Tensor):
        return _joined(outputs, made.fill)
    fields: dict[str, Any] = {"sequences": _joined([one.sequences for one in outputs], made.fill)}
    for name in ("scores", "logits"):
        if outputs[0].get(name) is not None:
            fields[name] = _steps([one[name] for one in outputs], made.fill)
    if outputs[0].get("sequences_scores") is not None:
        fields["sequences_scores"] = torch.cat([one["sequences_scores"] for one in outputs])
    if outputs[0].get("beam_indices") is not None:
        fields["beam_indices"] = _joined(
            [
                _counted_from(one["beam_indices"], part.start * made.num_beams)
                for one, part in zip(outputs, rows, strict=True)
            ],
            -1,
        )
    return type(outputs[0])(**fields)


def _joined(parts: Sequence[torch.Tensor], fill: int | None) -> torch.Tensor:
    """`[rows, length]` of each lane, one below the other; nothing is filled up if all are equally long."""
    length = max(part.shape[1] for part in parts)
    return torch.cat([_wide(part, length, fill) if part.shape[1] < length else part for part in parts])


def _wide(part: torch.Tensor, length: int, fill: int | None) -> torch.Tensor:
    assert fill is not None, "lanes that may end early were refused"
    return torch.cat([part, part.new_full((part.shape[0], length - part.shape[1]), fill)], dim=1)


def _steps(lanes: Sequence[tuple[torch.Tensor, ...]], fill: int | None) -> tuple[torch.Tensor, ...]:
    """Scores `[rows, vocabulary]` of each step."""
    steps = max(len(lane) for lane in lanes)
    return tuple(
        torch.cat([lane[step] if step < len(lane) else _certain(lane[0], fill) for lane in lanes])
        for step in range(steps)
    )


def _certain(like: torch.Tensor, fill: int | None) -> torch.Tensor:
    scores = torch.full_like(like, -torch.inf)
    if fill is not None and fill >= 0:
        scores[:, fill] = 0
    return scores


def _counted_from(indices: torch.Tensor, first: int) -> torch.Tensor:
    """Beam indices count the beams of the whole batch; -1 stands behind the end of a text."""
    return torch.where(indices >= 0, indices + first, indices)
