"""Checks of this machine's network. Each check has a timeout of its own, so a silent peer cannot delay the report."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from swarm.cli.doctor import verdicts
from swarm.cli.doctor.verdicts import Finding
from swarm.dht.directory import RelayDirectory, fetch_models
from swarm.dht.probe import ProbeResult, probe, read_record, write_record
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import AddressUnavailable, MembershipError, PeerLost, SwarmError
from swarm.membership.invite import Invite
from swarm.transport.p2p import P2PConfig, Peer
from swarm.transport.reach.relay_choice import Relay

CHECK_TIMEOUT_S = 15.0
"""Limit for each check."""

REACH_TIMEOUT_S = 40.0
"""For other peers to dial this machine back, and for relays to be tried where they cannot."""

MAX_MODELS = 4
"""Models whose servers are looked at for relays."""

REINSTALL = "reinstall hivemind: pip install --force-reinstall hivemind"

NO_PEERS = "no --initial-peers were given"
NO_PEERS_REMEDY = "swarm doctor --initial-peers ADDRESS..."


@asynccontextmanager
async def _temporary_peer(config: P2PConfig) -> AsyncIterator[Peer]:
    peer = await Peer.create(config, AnnouncementValidator())
    try:
        yield peer
    finally:
        await peer.shutdown()


async def check_listening(host_maddrs: Sequence[str]) -> list[Finding]:
    """Start a libp2p daemon that listens as a server does, and guess who could reach it."""
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S), _temporary_peer(P2PConfig(host_maddrs=tuple(host_maddrs))) as peer:
            addresses = await peer.visible_addresses()
    except AddressUnavailable as error:
        return [verdicts.failure("Listening", str(error), "stop that program, or choose another port: --host-maddrs")]
    except TimeoutError:
        why = f"the libp2p daemon was not ready in {CHECK_TIMEOUT_S:.0f} s"
        return [verdicts.failure("Listening", why, "try again when the machine is less busy")]
    except (PeerLost, OSError) as error:
        return [verdicts.failure("Listening", str(error), REINSTALL)]
    plain = [address.rpartition("/p2p/")[0] for address in addresses]
    found = verdicts.ok("Listening", f"the libp2p daemon starts and listens on {', '.join(plain) or 'nothing'}")
    return [found, verdicts.reachable(plain, [address for address in plain if verdicts.is_public(address)])]


async def check_reachability(joining: P2PConfig) -> Finding:
    """Join as a server does, and have other peers dial this machine.

    Args:
        joining: with those of the initial peers that answer, and the addresses to listen on.
    """
    try:
        async with asyncio.timeout(REACH_TIMEOUT_S), _temporary_peer(joining) as peer:
            peer.reach.relay_source = lambda: _relays(peer)
            await peer.reach.known.wait()
            return verdicts.reached(
                peer.reach.reach, peer.reach.is_reachable, peer.reach.describe(), peer.reach.advise()
            )
    except TimeoutError:
        why = f"no peer said within {REACH_TIMEOUT_S:.0f} s whether it can dial this machine"
        return verdicts.unknown(verdicts.FROM_OUTSIDE, why, "try again, or join by another peer")
    except (SwarmError, OSError) as error:
        return verdicts.unknown(verdicts.FROM_OUTSIDE, str(error), "try again, or join by another peer")


async def _relays(peer: Peer) -> list[Relay]:
    """The relays among the servers of the swarm's models."""
    found: dict[str, Relay] = {}
    for model in (await fetch_models(peer.dht))[:MAX_MODELS]:
        for relay in await RelayDirectory(peer, model.name, model.blocks).relays():
            found[relay.peer_id] = relay
    return list(found.values())


async def check_peers(joining: P2PConfig) -> tuple[list[Finding], list[str]]:
    """Dial each initial peer and compare clocks. Returns the findings and the addresses that can be used to join."""
    addresses = joining.initial_peers
    if not addresses:
        return [verdicts.unknown("Peers", NO_PEERS, NO_PEERS_REMEDY), verdicts.clock([])], []
    replies = await asyncio.gather(*(_probe_peer(address, joining.membership) for address in addresses))
    ahead = [reply.clock_ahead for reply in replies if isinstance(reply, ProbeResult)]
    findings, usable = [], []
    for address, reply in zip(addresses, replies, strict=True):
        if not isinstance(reply, ProbeResult):
            findings.append(verdicts.peer_lost(address, str(reply)))
            continue
        offset = abs(reply.clock_ahead - verdicts.median_clock_offset(ahead))
        findings.append(verdicts.peer(address, reply.round_trip, offset))
        if offset <= verdicts.MAX_CLOCK_OFFSET_S:
            usable.append(address)
    return [*findings, verdicts.clock(ahead)], usable


async def _probe_peer(address: str, membership: Invite | None) -> ProbeResult | PeerLost:
    """Dial one address with a daemon of its own: a daemon that knows the peer would not try its other addresses."""
    try:
        async with asyncio.timeout(2 * CHECK_TIMEOUT_S), _temporary_peer(P2PConfig(membership=membership)) as peer:
            return await probe(peer, address, CHECK_TIMEOUT_S)
    except PeerLost as error:
        return error
    except MembershipError as error:
        return PeerLost(str(error))
    except (TimeoutError, OSError) as error:
        return PeerLost(f"the libp2p daemon did not start: {error}")


async def check_dht(joining: P2PConfig, clock_is_right: bool) -> Finding:
    """Write a signed record to the DHT and read it back; see `swarm.dht.probe.write_record`.

    Args:
        joining: with those of the initial peers that answer.
    """
    check = "DHT"
    if not joining.initial_peers or not clock_is_right:
        return verdicts.unknown(check, "not tried: " + ("no initial peer answers" if clock_is_right else "see Clock"))
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S), _temporary_peer(joining) as peer:
            return await _write_and_read(peer)
    except TimeoutError:
        found = f"no answer within {CHECK_TIMEOUT_S:.0f} s"
        return verdicts.failure(check, found, "try again, or join by another peer")
    except Exception as error:  # noqa: BLE001  (hivemind raises many types while joining)
        found = (str(error).splitlines() or [type(error).__name__])[0]
        return verdicts.failure(check, found, "join by another peer of the swarm")


async def _write_and_read(peer: Peer) -> Finding:
    if not await write_record(peer):
        return verdicts.failure("DHT", "no peer stored a record", "the peers may run another version: update them")
    if not await read_record(peer):
        return verdicts.failure("DHT", "a record was stored but not found again", "join by another peer of the swarm")
    return verdicts.ok("DHT", "a signed record was written and read back")
