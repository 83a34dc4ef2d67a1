"""What servers are asked about exits inside their spans: in front of which blocks, and from which confidence on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swarm.client.early_exit.options import EarlyExit
from swarm.data_structures import Route
from swarm.models.exits.confidence import decayed_threshold
from swarm.protocol.messages import MAX_EXITS, ExitTerms


def span_thresholds(options: EarlyExit, route: Route, blocks: int) -> dict[int, float]:
    """The blocks in front of which servers of a route let tokens leave, and the threshold there; ascending.

    Args:
        blocks: of the model. Nothing leaves behind the last one.
    """
    found: dict[int, float] = {}
    for hop in route.hops:
        if options.confidence not in hop.server.exit_confidences:
            continue
        for block in hop.server.exit_blocks:
            threshold = options.threshold_at(block)
            if hop.span.start < block <= hop.span.end and block < blocks and threshold is not None:
                found[block] = threshold
    return dict(sorted(found.items()))


def exit_terms(options: EarlyExit, thresholds: Mapping[int, float], position: int, length: int) -> ExitTerms | None:
    """What the servers of a route are asked for one token; None if no token can leave inside their spans.

    Args:
        thresholds: by block, see `span_thresholds`.
        position: of the token among those that are generated, from 0.
        length: how many will be generated at most.
    """
    decayed = {
        block: decayed_threshold(threshold, options.decay, position, length) for block, threshold in thresholds.items()
    }
    # No confidence is above 1: servers need not look.
    possible = [(block, float(threshold)) for block, threshold in decayed.items() if threshold < 1]
    return ExitTerms(options.confidence, tuple(possible[:MAX_EXITS]), options.batch) if possible else None


def why_no_exits(options: EarlyExit, route: Route) -> str:
    """Why no server of a route lets tokens leave inside its span."""
    servers = [hop.server for hop in route.hops]
    if not any(server.exit_blocks for server in servers):
        return "no server of the route has exits"
    offering = [server for server in servers if options.confidence in server.exit_confidences]
    if not offering:
        offered = sorted({name for server in servers for name in server.exit_confidences})
        return f"no server of the route measures confidence={options.confidence!r}, only {', '.join(offered)}"
    blocks = sorted({block for server in offering for block in server.exit_blocks})
    return f"threshold, min_block and max_block leave out all exits of its servers, which are at blocks {blocks}"


def why_none_between(options: EarlyExit, route: Route) -> str | None:
    """Why no token can leave between the hops of a route; None if tokens can."""
    boundaries = list(route.boundaries)
    if not boundaries:
        return "one server has all blocks"
    if options.first_exit(boundaries) is not None:
        return None
    return f"threshold, min_block and max_block leave out all blocks at which its servers begin, which are {boundaries}"


def terms_for(
    options: EarlyExit,
    route: Route | None,
    blocks: int,
    position: int,
    length: int,
    warn: Callable[[str], None],
) -> ExitTerms | None:
    """What the servers of a route are asked for one token, see `exit_terms`; None for nothing.

    Args:
        blocks: of the model.
        warn: is told, for every token, if no token can leave on the route; writes each line to the log once.
    """
    if route is None:
        return None
    if options.fill == "exact":
        if reason := why_none_between(options, route):
            warn(f"early_exit: no token can leave on this route, because {reason}.")
        return None
    thresholds = span_thresholds(options, route, blocks)
    if not thresholds:
        warn(
            "early_exit with fill='project': no token can leave inside a server's span, because "
            f"{why_no_exits(options, route)}. Tokens leave between servers only, and all caches are exact."
        )
    return exit_terms(options, thresholds, position, length)
