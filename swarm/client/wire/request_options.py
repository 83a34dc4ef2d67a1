"""What a client asks of every server."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.data_structures import WireFormat


@dataclass(frozen=True)
class RequestOptions:
    """What a client asks of every server.

    Attributes:
        revision: the model's revision.
        wire: format of the replies.
        timeout: seconds to wait for one answer at most; usually much less, see `swarm.client.wire.reply_timeout`.
        push: let servers hand their outputs on to each other.
    """

    revision: str
    wire: WireFormat
    timeout: float
    push: bool = True
