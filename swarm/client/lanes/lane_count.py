"""Lanes: recurrent pipeline parallelism (MDI-LLM, section III-C). How many there are, and who has which rows. Pure.

A text's next token can only be computed when the one before is known, so a chain of servers that writes one text lets
all but one of them wait. Several groups of rows, each with its own caches at every server (the paper's rotating KV
caches), keep all of them busy: the token of one lane travels while the others are computed.
"""

from __future__ import annotations

import itertools
from typing import Literal

from swarm.errors import InvalidOption

LaneCount = int | Literal["auto"]

MAX_LANES = 256
"""Each is a thread here and a session at every server."""


def validate_lane_count(wanted: LaneCount) -> None:
    """Raise `InvalidOption` if that is no number of lanes."""
    if wanted == "auto":
        return
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= MAX_LANES:
        raise InvalidOption(f'lanes={wanted!r} is neither "auto" nor a number from 1 to {MAX_LANES}')


def choose_lane_count(wanted: LaneCount, rows: int, stages: int) -> int:
    """How many lanes `rows` rows are divided into.

    Args:
        wanted: that many, or "auto": one for each stage, so that no stage has to wait if all are equally fast.
        stages: servers of the route, and one more if this client computes first blocks itself.
    """
    return max(1, min(stages if wanted == "auto" else wanted, rows, MAX_LANES))


def split_sequences(rows: int, lanes: int) -> list[slice]:
    """Contiguous groups of rows, in order, whose sizes differ by at most one. There are no more lanes than rows."""
    size, larger = divmod(rows, lanes)
    edges = [lane * size + min(lane, larger) for lane in range(lanes + 1)]
    return [slice(start, end) for start, end in itertools.pairwise(edges)]
