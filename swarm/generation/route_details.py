"""What happens to the route of a session, as JSON for clients that ask for details; see `docs/gateway.md`."""

from __future__ import annotations

from typing import Any

from swarm.client.routes.events import BlocksMissing, HopLost, Recovered, RouteTaken
from swarm.errors import format_blocks
from swarm.generation.sequence_generation import SequenceEvent


def route_detail(event: SequenceEvent) -> dict[str, Any] | None:
    """The detail that describes an event; None if clients are not told of it."""
    match event:
        case RouteTaken(route):
            hops = [
                {"blocks": str(hop.span), "peer": hop.server.short_id, "name": hop.server.name} for hop in route.hops
            ]
            return {"kind": "route", "hops": hops}
        case HopLost(peer_id, span, reason):
            return {"kind": "lost", "peer": "…" + peer_id[-6:], "blocks": str(span), "reason": reason}
        case BlocksMissing(blocks):
            return {"kind": "missing", "blocks": format_blocks(blocks)}
        case Recovered(seconds):
            return {"kind": "recovered", "seconds": round(seconds, 3)}
    return None
