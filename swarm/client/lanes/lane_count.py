"""Lanes: recurrent pipeline parallelism (MDI-LLM, section III-C). How many, and which sequences each has. Pure.

A text's next token can be computed only when the one before is known, so a chain of servers that generates one text
keeps all servers but one waiting. Several groups of sequences, each with its own caches at every server (the paper's
rotating KV caches), keep all of them busy: the token of one lane travels while those of the others are computed.
"""

from __future__ import annotations

import itertools
from typing import Literal

from swarm.errors import InvalidOption

LaneCount = int | Literal["auto"]
"""A number of lanes, or "auto" for one a stage."""

MAX_LANES = 256
"""Most lanes of one call: each is a thread at this client and a session at every server."""


def validate_lane_count(lanes: LaneCount) -> None:
    """Raise `InvalidOption` if `lanes` is not a valid number of lanes."""
    if lanes == "auto":
        return
    if isinstance(lanes, bool) or not isinstance(lanes, int) or not 1 <= lanes <= MAX_LANES:
        raise InvalidOption(f'lanes={lanes!r} is neither "auto" nor a number from 1 to {MAX_LANES}')


def choose_lane_count(lanes: LaneCount, sequences: int, stages: int) -> int:
    """How many lanes a batch of `sequences` sequences is divided into.

    Args:
        lanes: the number asked for, or "auto": one lane for each stage, so that no stage waits if all are equally fast.
        stages: servers of the route, and one more if this client computes the first blocks itself.
    """
    return max(1, min(stages if lanes == "auto" else lanes, sequences, MAX_LANES))


def split_sequences(sequences: int, lanes: int) -> list[slice]:
    """Contiguous groups of sequences, in order, whose sizes differ by at most one; at least one sequence a lane."""
    size, larger = divmod(sequences, lanes)
    edges = [lane * size + min(lane, larger) for lane in range(lanes + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(edges)]
