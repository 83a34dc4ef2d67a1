"""What a person decides about a client."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.data_structures import WireFormat


@dataclass(frozen=True)
class ClientConfig:
    """Attributes:
    initial_peers: addresses of peers of the swarm.
    wire: how hidden states travel, in both directions.
    request_timeout: seconds to wait for one server's answer.
    refresh: seconds that a view of the swarm may be old when a new route is planned.
    show_route: print every route that is taken.
    """

    initial_peers: tuple[str, ...]
    wire: WireFormat = WireFormat.NONE
    request_timeout: float = 60.0
    refresh: float = 15.0
    show_route: bool = False
