"""A stranger who knows the addresses of a swarm's servers, and asks them for all that there is to ask."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from hivemind.p2p import PeerID
from multiaddr import Multiaddr

from swarm.data_structures import ServerInfo, ServerState, Span, WireFormat
from swarm.dht.server_records import encode_announcement, model_key
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import PeerLost, RemoteError, SwarmError, UsageError
from swarm.protocol import messages
from swarm.protocol.compression import encode_tensor
from swarm.transport.dht.records import key_bytes, sign
from swarm.transport.p2p import P2PConfig, Peer

ANSWER_TIMEOUT_S = 20.0
ROWS = 2

EVERYTHING = frozenset(
    {"join", "ping", "find", "store", "session", "step", "push", "link", "forward", "info", "probe", "adapters"}
)
"""What a stranger gets in an open swarm."""


@dataclass(frozen=True)
class Served:
    """A server as a stranger may know it.

    Attributes:
        model: the model's name.
        span: the blocks that it holds.
        revision, hidden_size: of the model.
    """

    address: str
    model: str
    span: Span
    revision: str
    hidden_size: int

    @property
    def peer_id(self) -> str:
        return self.address.rpartition("/p2p/")[2]


async def ask_for_everything(served: Served, config: P2PConfig | None = None) -> frozenset[str]:
    """What a peer gets from a server, of `EVERYTHING`.

    Args:
        config: how the peer tries to join; None for a peer without an invite.
    """
    got = set()
    try:
        joined = await Peer.create(config or P2PConfig((served.address,)), AnnouncementValidator())
        got.add("join")
        await joined.shutdown()
    except UsageError:
        pass
    peer = await Peer.create(P2PConfig(host_maddrs=("/ip4/127.0.0.1/tcp/0",)), AnnouncementValidator())
    try:
        where = Multiaddr(served.address.rpartition("/p2p/")[0])
        await peer.dht.p2p._client.connect(PeerID.from_base58(served.peer_id), [where])
        got |= await _ask_dht(peer, served)
        got |= await _ask_on_streams(peer, served)
    finally:
        await peer.shutdown()
    return frozenset(got)


async def _ask_dht(peer: Peer, served: Served) -> set[str]:
    protocol, target = peer.dht.protocol, PeerID.from_base58(served.peer_id)
    got = set()
    if await protocol.call_ping(target):
        got.add("ping")
    name = model_key(served.model, served.span.start)
    with suppress(SwarmError):
        await protocol.call_find(target, [key_bytes(name)])
        got.add("find")
    info = ServerInfo(
        peer_id=peer.peer_id,
        span=Span(served.span.start, served.span.start + 1),
        state=ServerState.OFFLINE,
        throughput=1.0,
        cache_tokens_free=0,
        revision="none",
        digests=(),
        compute_dtype="float32",
        quantization="none",
        version="1",
    )
    payload = encode_announcement(served.model, info)
    with suppress(SwarmError):
        if any(await protocol.call_store(target, [sign(name, payload, time.time() + 30, peer.identity.private_key)])):
            got.add("store")
    return got


async def _ask_on_streams(peer: Peer, served: Served) -> set[str]:
    """One stream for each thing. An answer that is not about membership counts as something that was got."""
    span, wire = served.span, WireFormat.NONE
    session = os.urandom(16)
    hidden_TH = bytes(encode_tensor(torch.zeros(ROWS, served.hidden_size), wire))
    opening = messages.OpenSession(session, served.revision, span.start, span.end, 8, wire)
    step = messages.StepRequest(0, [0], [ROWS], wire, "float32")
    forward = messages.ForwardRequest(served.revision, span.start, span.end, [ROWS], wire, "float32", wire)
    asked: dict[str, Sequence[tuple[messages.Message, bytes]]] = {
        "session": [(opening, b"")],
        "step": [(opening, b""), (step, hidden_TH)],
        "link": [(opening, b""), (messages.SetNeighbors(None, None, None), b""), (step, hidden_TH)],
        "push": [(messages.PushRequest(peer.peer_id, session, step), hidden_TH)],
        "forward": [(forward, hidden_TH)],
        "info": [(messages.InfoRequest(), b"")],
        "probe": [(messages.ProbeRequest(1000), b"")],
        "adapters": [(messages.PutAdapters(span.start, [None], "float32"), b"")],
    }
    got = set()
    for name, conversation in asked.items():
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                if await _is_answered(peer, served.peer_id, conversation):
                    got.add(name)
        except (RemoteError, TimeoutError):
            pass
    return got


async def _is_answered(peer: Peer, target: str, conversation: Sequence[tuple[messages.Message, bytes]]) -> bool:
    """Whether a server answers all of it, be it by a refusal that has another reason than membership."""
    stream = await peer.open_stream(target)
    try:
        for message, payload in conversation:
            await stream.send(message, payload)
            if isinstance(message, messages.SetNeighbors):
                continue  # which has no answer
            reply = messages.decode_server((await stream.receive()).header)
            if isinstance(reply, messages.Refusal) and reply.code in ("not_a_member", "unknown_authority"):
                return False
        return True
    except PeerLost:
        return False
    finally:
        stream.close()
