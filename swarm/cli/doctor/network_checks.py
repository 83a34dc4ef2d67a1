"""What this machine's network does. Each check ends in its own time, whatever others do or do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from swarm.cli.doctor import verdicts
from swarm.cli.doctor.verdicts import Finding
from swarm.dht.probe import ProbeResult, probe, read_record, write_record
from swarm.dht.validation import AnnouncementValidator
from swarm.errors import AddressUnavailable, PeerLost
from swarm.transport.p2p import P2PConfig, Peer

PATIENCE = 15.0
"""Seconds for each check."""

REINSTALL = "install hivemind anew: pip install --force-reinstall hivemind"

NO_PEERS = "no --initial-peers were given"
GIVE_PEERS = "swarm doctor --initial-peers ADDRESS..."


@asynccontextmanager
async def _peer(config: P2PConfig) -> AsyncIterator[Peer]:
    peer = await Peer.create(config, AnnouncementValidator())
    try:
        yield peer
    finally:
        await peer.shutdown()


async def listening(host_maddrs: Sequence[str]) -> list[Finding]:
    """Start a libp2p daemon that listens there, as a server does; who could reach it."""
    try:
        async with asyncio.timeout(PATIENCE), _peer(P2PConfig(host_maddrs=tuple(host_maddrs))) as peer:
            addresses = await peer.visible_addresses()
    except AddressUnavailable as error:
        return [verdicts.failure("Listening", str(error), "end that program, or name another port with --host-maddrs")]
    except TimeoutError:
        why = f"the libp2p daemon was not ready in {PATIENCE:.0f} s"
        return [verdicts.failure("Listening", why, "try again when the machine is less busy")]
    except (PeerLost, OSError) as error:
        return [verdicts.failure("Listening", str(error), REINSTALL)]
    plain = [address.rpartition("/p2p/")[0] for address in addresses]
    found = verdicts.ok("Listening", f"the libp2p daemon starts and listens on {', '.join(plain) or 'nothing'}")
    return [found, verdicts.reachable(plain, [address for address in plain if verdicts.is_public(address)])]


async def peers(addresses: Sequence[str]) -> tuple[list[Finding], list[str]]:
    """Dial each initial peer, compare clocks; the addresses by which one can join."""
    if not addresses:
        return [verdicts.unknown("Peers", NO_PEERS, GIVE_PEERS), verdicts.clock([])], []
    asked = await asyncio.gather(*(_echo(address) for address in addresses))
    ahead = [echo.clock_ahead for echo in asked if isinstance(echo, ProbeResult)]
    findings, usable = [], []
    for address, echo in zip(addresses, asked, strict=True):
        if not isinstance(echo, ProbeResult):
            findings.append(verdicts.peer_lost(address, str(echo)))
            continue
        off = abs(echo.clock_ahead - verdicts.peers_time(ahead))
        findings.append(verdicts.peer(address, echo.round_trip, off))
        if off <= verdicts.CLOCK_TOLERANCE:
            usable.append(address)
    return [*findings, verdicts.clock(ahead)], usable


async def _echo(address: str) -> ProbeResult | PeerLost:
    """With a daemon of its own: one that is connected to a peer already does not try another address of it."""
    try:
        async with asyncio.timeout(2 * PATIENCE), _peer(P2PConfig()) as peer:
            return await probe(peer, address, PATIENCE)
    except PeerLost as error:
        return error
    except (TimeoutError, OSError) as error:
        return PeerLost(f"the libp2p daemon did not start: {error}")


async def record(addresses: Sequence[str], clock_is_right: bool) -> Finding:
    """Write a signed record to the DHT and read it again; see `swarm.dht.probe.write_record`."""
    check = "DHT"
    if not addresses or not clock_is_right:
        return verdicts.unknown(check, "not tried: " + ("no initial peer answers" if clock_is_right else "see Clock"))
    try:
        async with asyncio.timeout(PATIENCE), _peer(P2PConfig(initial_peers=tuple(addresses))) as peer:
            return await _write_and_read(peer)
    except TimeoutError:
        return verdicts.failure(check, f"no answer within {PATIENCE:.0f} s", "try again; else join by another peer")
    except Exception as error:  # hivemind raises many types, among them for clocks that differ
        why = (str(error).splitlines() or [type(error).__name__])[0]
        return verdicts.failure(check, why, "join by another peer of the swarm")


async def _write_and_read(peer: Peer) -> Finding:
    if not await write_record(peer):
        return verdicts.failure("DHT", "no peer stored a record", "the peers may run another version: update them")
    if not await read_record(peer):
        return verdicts.failure("DHT", "a record was stored, but not found again", "join by another peer of the swarm")
    return verdicts.ok("DHT", "a signed record was written and read again")
