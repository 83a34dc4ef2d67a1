"""Puts proofs of membership into the requests and responses of a private swarm's DHT, and refuses those without one.

The proofs are in the `auth` fields that hivemind has for its authorizers. An authorizer itself learns neither the
receiver of a request nor its sender, so a stranger that a member calls could pass the request on to another member and
get it answered. This lock sits one layer deeper, where libp2p's peer ids of both sides are known, and signs them.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon import P2PContext

from swarm.errors import MembershipNotProven, NotAMember
from swarm.membership.certificates import MAX_CERTIFICATE_BYTES, Purpose
from swarm.membership.membership import NONCE_BYTES, Membership, Statement

MAX_AGE_S = 60.0
"""How old a request may be when it arrives, or how far the clocks may differ."""

CLOCKS_DIFFER = "the clocks of two peers differ"
Handler = Callable[[Any, P2PContext], Awaitable[Any]]
Call = Callable[[], Awaitable[Any]]


class DhtLock:
    """Signs and verifies what one member sends to others and gets from them.

    Messages are hivemind's protobufs with an `auth` field. The signature covers the message with that field empty, its
    type, both peer ids, and a nonce of the one that asks. libp2p encrypts a message, and it names its receiver, so the
    receiver need not remember earlier nonces.
    """

    def __init__(self, membership: Membership, now: Callable[[], float] = time.time) -> None:
        self._membership = membership
        self._now = now

    def guard(self, handler: Handler) -> Handler:
        """A handler that raises `NotAMember` unless the request is a member's. hivemind sends the error's text back."""

        async def guarded(request: Any, context: P2PContext) -> Any:
            caller, this = context.remote_id.to_base58(), context.local_id.to_base58()
            nonce = self.open_request(request, caller, this)
            response = await handler(request, context)
            self.sign_response(response, this, caller, nonce)
            return response

        return guarded

    async def call(self, call: Call, request: Any, own: PeerID, target: PeerID) -> Any:
        """Sign a request, send it with `call`, and return its response. Raises `NotAMember` if a stranger answered."""
        caller, called = own.to_base58(), target.to_base58()
        nonce = self.sign_request(request, caller, called)
        response = await call()
        self.open_response(response, called, caller, nonce)
        return response

    def sign_request(self, request: Any, caller: str, called: str) -> bytes:
        """Fill in the request's `auth`. Returns the nonce that the response has to name."""
        request.ClearField("auth")
        nonce = secrets.token_bytes(NONCE_BYTES)
        sent = self._now()
        content = _digest(request, sent)
        auth = request.auth
        auth.client_access_token.public_key = self._membership.certificate
        auth.time, auth.nonce = sent, nonce
        statement = Statement(caller, called, self._membership.certificate, (b"", nonce), content)
        auth.signature = self._membership.prove(Purpose.REQUEST, statement)
        return nonce

    def open_request(self, request: Any, caller: str, called: str) -> bytes:
        """Verify a request and empty its `auth`. Returns its nonce. Raises `NotAMember`, or one of its subclasses."""
        auth = request.auth
        certificate, signature = auth.client_access_token.public_key, auth.signature
        nonce, sent = bytes(auth.nonce), float(auth.time)
        self._require_proof(certificate, nonce, caller)
        if not abs(self._now() - sent) <= MAX_AGE_S:
            raise MembershipNotProven(f"a request is more than {MAX_AGE_S:.0f} s old, or {CLOCKS_DIFFER}")
        request.ClearField("auth")
        statement = Statement(caller, called, certificate, (b"", nonce), _digest(request, sent))
        self._membership.verify(Purpose.REQUEST, statement, signature)
        return nonce

    def sign_response(self, response: Any, called: str, caller: str, nonce: bytes) -> None:
        """Fill in the response's `auth`."""
        response.ClearField("auth")
        content = _digest(response)
        auth = response.auth
        auth.service_access_token.public_key = self._membership.certificate
        auth.nonce = nonce
        statement = Statement(called, caller, self._membership.certificate, (nonce, b""), content)
        auth.signature = self._membership.prove(Purpose.RESPONSE, statement)

    def open_response(self, response: Any, called: str, caller: str, nonce: bytes) -> None:
        """Verify a response and empty its `auth`. Raises `NotAMember`, or one of its subclasses."""
        auth = response.auth
        certificate, signature = auth.service_access_token.public_key, auth.signature
        self._require_proof(certificate, auth.nonce, called)
        response.ClearField("auth")
        statement = Statement(called, caller, certificate, (nonce, b""), _digest(response))
        self._membership.verify(Purpose.RESPONSE, statement, signature)

    def _require_proof(self, certificate: bytes, nonce: bytes, speaker: str) -> None:
        """Look at what is cheap to look at, and at the certificate, before a whole message is hashed."""
        if not certificate:
            raise NotAMember(
                f"peer …{speaker[-6:]} shows no membership, and this swarm is private: ask the person who runs it for "
                "an invite"
            )
        if len(certificate) > MAX_CERTIFICATE_BYTES or len(nonce) != NONCE_BYTES:
            raise NotAMember(f"peer …{speaker[-6:]} shows something else than a membership")
        self._membership.judge(certificate)


def _digest(message: Any, sent: float = 0.0) -> bytes:
    """A digest of a message without `auth`, of its type, and of the time at which it was sent."""
    return hashlib.sha256(
        b"%s\x00%s\x00%s" % (type(message).__name__.encode(), float(sent).hex().encode(), message.SerializeToString())
    ).digest()
