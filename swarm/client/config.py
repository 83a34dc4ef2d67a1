"""What a person decides about a client."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.data_structures import Span, WireFormat


@dataclass(frozen=True)
class ClientConfig:
    """Attributes:
    initial_peers: addresses of peers of the swarm.
    wire: how hidden states travel, in both directions.
    request_timeout: seconds to wait for one answer at most; usually much less, from what answers took so far.
    refresh: seconds between looks at the swarm while the client is in use.
    wait_for_blocks: seconds to wait for a server when nobody holds some blocks.
    allowed_servers: peer ids that may be used; None allows all.
    blocked_servers: peer ids that are never used.
    push: let servers hand their outputs on to each other.
    show_route: print every route that a session takes.
    local_blocks: first blocks that the client computes itself.
    quant: forms of weights that servers may have, see `swarm.models.weights.quantization`; None allows all.
    """

    initial_peers: tuple[str, ...]
    wire: WireFormat = WireFormat.NONE
    request_timeout: float = 60.0
    refresh: float = 15.0
    wait_for_blocks: float = 60.0
    allowed_servers: frozenset[str] | None = None
    blocked_servers: frozenset[str] = frozenset()
    push: bool = True
    show_route: bool = False
    local_blocks: Span | None = None
    quant: frozenset[str] | None = None
