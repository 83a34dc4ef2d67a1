"""Messages by which a peer finds out whether others can reach it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarm.protocol.messages.fields import Message

MAX_PORTS = 4
"""Ports that one request may have tried."""

PeerId = Annotated[str, msgspec.Meta(pattern=r"\A[1-9A-HJ-NP-Za-km-z]{1,128}\Z")]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Ports = Annotated[list[Port], msgspec.Meta(max_length=MAX_PORTS)]


class DialBackRequest(Message, frozen=True):
    """Ask a peer to dial this one at these ports of the IP address from which it sees this stream come."""

    ports: Ports


class UnreachableNotice(Message, frozen=True):
    """Tell a peer that this one has failed to dial another, to which it may have a connection."""

    peer_id: PeerId


class LookAgain(Message, frozen=True):
    """Tell a peer that another one has failed to dial it."""


class ForgetConnections(Message, frozen=True):
    """Tell a relay to close all its connections to this peer, because this one has lost some of them."""


class DialBackReply(Message, frozen=True):
    """That address, and the ports at which the asking peer, and no other, has answered."""

    host: Annotated[str, msgspec.Meta(max_length=45)]
    reached: Ports
