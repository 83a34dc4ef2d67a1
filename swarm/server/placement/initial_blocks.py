"""Which blocks a joining server should take. Pure: from announcements to a span.

A joining server takes the contiguous window whose blocks are served worst (Petals, section 3.2). Joining servers count
as if they served already, or all newcomers would take the same blocks; servers that announced that they leave do not.

A rate counts as at most `MAX_PLAUSIBLE_RATIO` times the rate that nine in ten servers stay below, so a server that lies
can keep others away from its blocks by that much and no more. The percentile leaves out the fastest tenth, at least one
server, so a single liar cannot raise its own limit. Of log-normal rates with sigma 1 the limit hides 1 to 2 % of all
throughput.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from swarm.data_structures import ServerInfo, ServerState, Span

MAX_PLAUSIBLE_RATIO = 4.0
"""An announced rate is believed up to this multiple of the 90th percentile."""


def plausible_rate(rates: NDArray[np.float64]) -> float:
    """The largest rate (tokens/s) that is believed, given what all servers announce; infinite if there are none."""
    if not rates.size:
        return float("inf")
    rank = (len(rates) - 1) * 9 // 10
    return MAX_PLAUSIBLE_RATIO * float(np.partition(rates, rank)[rank])


def sum_by_block(
    starts: NDArray[np.int64], ends: NDArray[np.int64], values: NDArray[np.float64], blocks: int
) -> NDArray[np.float64]:
    """For each of `blocks` blocks the sum of the `values` (one a server) of the servers with start <= block < end."""
    lengths = ends - starts
    first = np.cumsum(lengths) - lengths
    held = np.arange(int(lengths.sum())) + np.repeat(starts - first, lengths)
    # Summed anew rather than as differences of running sums, which would leave a gap at 1e-16 tokens/s.
    return np.bincount(held, weights=np.repeat(values, lengths), minlength=blocks).astype(np.float64, copy=False)


def believed_throughputs(
    starts: NDArray[np.int64], ends: NDArray[np.int64], rates: NDArray[np.float64], blocks: int
) -> NDArray[np.float64]:
    """Tokens/s that servers with these spans and announced rates are believed to push through each block."""
    return sum_by_block(starts, ends, np.minimum(rates, plausible_rate(rates)), blocks)


def block_throughputs(servers: Iterable[ServerInfo], blocks: int) -> list[float]:
    """Tokens/s that the swarm is believed to push through each block."""
    counted = [s for s in servers if s.state is not ServerState.OFFLINE and s.span.start < blocks]
    rates = np.array([server.tokens_per_second for server in counted], dtype=np.float64)
    starts = np.array([server.span.start for server in counted], dtype=np.int64)
    ends = np.array([min(server.span.end, blocks) for server in counted], dtype=np.int64)
    result: list[float] = believed_throughputs(starts, ends, rates, blocks).tolist()
    return result


def weakest_window(throughputs: Sequence[float], length: int, allowed: Collection[Span] = ()) -> Span:
    """The window of `length` blocks that holds the weakest ones; of the `allowed` ones, if there are any.

    Windows are compared by their blocks' throughputs from the lowest up, so a gap counts more than anything else, two
    gaps more than one; of equal windows the first is taken.
    """
    starts = [span.start for span in allowed] or range(len(throughputs) - length + 1)
    start = min(starts, key=lambda start: (sorted(throughputs[start : start + length]), start))
    return Span(start, start + length)
