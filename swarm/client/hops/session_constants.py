"""What stays the same for all hops of a session, whatever happens to its servers."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.client.config import RequestOptions
from swarm.client.routes.events import EventListener, ignore_events
from swarm.client.routes.route_source import RouteSource
from swarm.client.wire.adapter_upload import AdapterUpload
from swarm.data_structures import Span
from swarm.transport.stream import Network


@dataclass(frozen=True)
class SessionContext:
    """The constants of one session.

    Attributes:
        network: this client's place in the network.
        routes: finds routes and hears which servers failed.
        options: what is asked of every server.
        span: the blocks.
        max_length: tokens that each sequence may have.
        adapter: what is added to the blocks.
        emit: receives the session's events.
        early_exits: whether servers may be asked to let tokens leave inside their spans, which is approximate.
        boundaries: blocks in front of which a hop begins, also inside a server's span.
    """

    network: Network
    routes: RouteSource
    options: RequestOptions
    span: Span
    max_length: int
    adapter: AdapterUpload = field(default_factory=AdapterUpload)
    emit: EventListener = ignore_events
    early_exits: bool = False
    boundaries: tuple[int, ...] = ()
