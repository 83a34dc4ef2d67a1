"""Diagnostics for `swarm doctor`: probing one address at a time, and storing one trial record.

Joining the DHT reports on all addresses together, and does not say so if it fails because the clocks differ.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from hivemind.p2p import P2PDaemonError, P2PHandlerError, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import ControlFailure
from hivemind.proto import dht_pb2
from multiaddr import Multiaddr

from swarm.common.version import VERSION
from swarm.data_structures import ServerInfo, ServerState, Span
from swarm.dht.directory import fetch_servers
from swarm.dht.server_records import encode_announcement, model_key
from swarm.errors import NotAMember, PeerLost, sanitize_text
from swarm.transport.p2p import Peer

PROBE_EXCHANGES = 3
"""Exchanges after the dial. The quickest one tells most about the clock."""

TRIAL_RECORD_LIFETIME_S = 30.0
"""How long a trial record lives."""


@dataclass(frozen=True)
class ProbeResult:
    """Round trip and clock of a peer that answered a probe.

    Attributes:
        round_trip: seconds of the quickest exchange.
        clock_ahead: seconds by which the peer's clock is ahead of ours, within half a round trip.
    """

    round_trip: float
    clock_ahead: float


async def probe(peer: Peer, address: str, timeout_s: float) -> ProbeResult:
    """Dial an address that ends in a peer id, and ask the peer for its time.

    Args:
        peer: this peer; it need not have joined.
        timeout_s: time limit for all of it.

    Raises:
        PeerLost: no peer answers at that address, or a different one does; or one of the two is not a member of the
            other's swarm.
    """
    where, _, peer_id = address.rpartition("/p2p/")
    try:
        async with asyncio.timeout(timeout_s):
            target = PeerID.from_base58(peer_id)
            # A relay's address ends in /p2p-circuit: everything before the target's id is the path to it.
            await peer.dht.p2p._client.connect(target, [Multiaddr(where)])
            return min(
                [await _exchange(peer, target) for _ in range(PROBE_EXCHANGES)], key=lambda echo: echo.round_trip
            )
    except TimeoutError:
        raise PeerLost(f"no answer within {timeout_s:.0f} s") from None
    except NotAMember as error:
        raise PeerLost(str(error)) from None
    except P2PHandlerError as error:
        raise PeerLost(sanitize_text(str(error))) from None
    except (P2PDaemonError, ControlFailure, OSError, asyncio.IncompleteReadError, ValueError) as error:
        raise PeerLost(str(error) or type(error).__name__) from None


async def _exchange(peer: Peer, target: PeerID) -> ProbeResult:
    """Exchange one ping of the DHT; the answer contains the peer's time."""
    stub = peer.dht.protocol.get_stub(target)
    sent, began = time.time(), time.perf_counter()
    answer = await stub.rpc_ping(dht_pb2.PingRequest(peer=peer.dht.protocol.node_info, validate=False))
    took = time.perf_counter() - began
    return ProbeResult(took, float(answer.dht_time) - (sent + took / 2))


async def write_record(peer: Peer) -> bool:
    """Store a signed trial record. False if no peer of the DHT accepted it.

    It announces an offline server of a model with a unique name, so it does not change what other peers see.

    Args:
        peer: this peer; a client, so that it does not store the record itself.

    Raises:
        DhtError: no peer answered.
    """
    info = ServerInfo(
        peer_id=peer.peer_id,
        span=Span(0, 1),
        state=ServerState.OFFLINE,
        throughput=1.0,
        cache_tokens_free=0,
        revision="none",
        digests=(),
        compute_dtype="float32",
        quantization="none",
        version=VERSION,
    )
    model, expires = _trial_model(peer), time.time() + TRIAL_RECORD_LIFETIME_S
    [is_stored] = await peer.dht.store([(model_key(model, 0), encode_announcement(model, info), expires)])
    return is_stored


async def read_record(peer: Peer) -> bool:
    """Whether other peers return the record of `write_record`. Raises `DhtError`."""
    found = await fetch_servers(peer.dht, _trial_model(peer), blocks=1)
    return [one.peer_id for one in found] == [peer.peer_id]


def _trial_model(peer: Peer) -> str:
    """Name of a model that no server serves."""
    return f"trial/{peer.peer_id}"
