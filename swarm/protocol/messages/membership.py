"""Messages of the exchange with which each stream of a private swarm begins (`swarm.transport.members`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarm.protocol.messages.fields import Count, Message

Nonce = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class MemberChallenge(Message, frozen=True):
    """Asks the peer that opened a stream to prove that it is a member. It says nothing else."""

    nonce: Nonce


class MemberProof(Message, frozen=True):
    """A certificate, and a signature with its key over both peer ids and both nonces.

    `revocations` is the number of the newest list that the sender has seen. If the dialer has an older one, the
    acceptor's payload is the list.
    """

    certificate: Annotated[bytes, msgspec.Meta(max_length=512)]
    nonce: Nonce
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
    revocations: Count


class NewerRevocations(Message, frozen=True):
    """The payload is the list of revocations that the dialer has and the acceptor has not seen."""
