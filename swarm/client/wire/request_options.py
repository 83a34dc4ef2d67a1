"""The options that every request of one client carries or obeys."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.data_structures import WireFormat


@dataclass(frozen=True)
class RequestOptions:
    """The options that every request of one client carries or obeys.

    Attributes:
        revision: revision of the model.
        wire: format of the replies.
        timeout: upper limit in seconds for one reply. Most timeouts are much shorter; see
            `swarm.client.wire.timeout_estimator`.
        push: let servers send their outputs directly to the next server.
    """

    revision: str
    wire: WireFormat
    timeout: float
    push: bool = True
