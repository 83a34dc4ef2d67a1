"""Holding places at relays: choosing them, proving that they work, renewing them, and replacing those that fail."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from hivemind.p2p import P2P, P2PDaemonError, PeerID
from multiaddr import Multiaddr

from swarm.errors import MembershipNotProven, PeerLost, RemoteError
from swarm.protocol import messages
from swarm.transport import daemon_streams
from swarm.transport.addresses import is_direct
from swarm.transport.reach.circuit import ask_for_place
from swarm.transport.reach.dial_back import ask
from swarm.transport.reach.dialer import Dialer, dial_seconds
from swarm.transport.reach.heartbeat import BEAT_PERIOD_S, BEAT_TIMEOUT_S, Heartbeat
from swarm.transport.reach.relay_choice import PLACES, Relay, order_to_ask
from swarm.transport.stream import FrameStream

logger = logging.getLogger(__name__)

CHECK_PERIOD_S = 0.5
"""How often it is looked whether the connections to the relays have ended."""

RENEW_SHARE = 0.5
"""A place is renewed when this share of its time is over."""

FORGET_TIMEOUT_S = 2.0

RELAY_TIMEOUT_S = 5.0
"""How long a relay may take to be connected to, to grant a place, and to carry a first connection; for the last, the
time that messages are on their way comes on top (`dial_seconds`)."""

PROVE_PERIOD_S = 300.0
"""How often it is tried out that a relay still carries connections. One that only answers pings is found out by it."""

RETRY_S = 20.0
"""After this time a relay that failed is asked again, those that have not failed before it."""

HURRY_S = 3.0
"""The same for a peer that has no place at all: a busy machine may have been why the relay failed."""

MAX_LOSSES, STEADY_S = 3, 60.0
"""A place that is lost so often, each time sooner than this, is given up: the relay ends connections. Places at
bootstrap peers are kept until others have stood for so long."""

ASKED_AT_MOST = 2 * PLACES
"""Relays that are asked before the places that are held are looked at again."""

MIN_PLACES = 2
"""Bootstrap peers are asked only where other relays have fewer places than this."""

KnownRelays = Callable[[], Awaitable[Sequence[Relay]]]
"""The peers that relay, as far as they are known."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A place at a relay. Times are those of the monotonic clock.

    Attributes:
        heartbeat: on the connection with which the relay would forget the place.
        prove_at: when to prove again that the relay carries connections.
        losses: how often it was lost before, each time soon.
    """

    relay: Relay
    heartbeat: Heartbeat
    renew_at: float
    prove_at: float
    beat_at: float
    since: float
    losses: int


class RelayPlaces:
    """The places that this peer holds.

    Args:
        p2p: its daemon.
        dialer: proves that a place works.
        open_stream: opens a stream for messages about reachability. Raises `RemoteError`.
        known_relays: who could be asked.
        on_change: called when a place is won, or lost: at once, before it is tried to get it again.

    Attributes:
        failure: why a relay gave no place that works, most recently; empty if all did.
    """

    def __init__(
        self,
        p2p: P2P,
        dialer: Dialer,
        open_stream: Callable[[str], Awaitable[FrameStream]],
        known_relays: KnownRelays,
        on_change: Callable[[], None],
    ) -> None:
        self.failure = ""
        self._p2p = p2p
        self._dialer = dialer
        self._open_stream = open_stream
        self._known_relays = known_relays
        self._on_change = on_change
        self._own_id: str = p2p.peer_id.to_base58()
        self._held: dict[str, _Place] = {}
        self._doubted: set[str] = set()
        """Relays to prove at once, because a connection over them failed."""
        self._regaining = 0
        self._told: tuple[tuple[Relay, ...], bool] = (), False
        self._failed_at: dict[str, float] = {}

    @property
    def relays(self) -> tuple[Relay, ...]:
        """The relays through which this peer can be reached now, bootstrap peers last."""
        held = [place.relay for place in self._held.values()]
        return tuple(sorted(held, key=lambda relay: relay.is_bootstrap))

    @property
    def is_regaining(self) -> bool:
        """Whether the last place was lost just now, and it is not yet known whether it can be had again."""
        return self._regaining > 0 and not self._held

    def doubt(self) -> None:
        """A connection could not be carried: try out soon whether the places still work."""
        self._doubted.update(self._held)

    async def run(self) -> None:
        """Hold places until this is canceled."""
        while True:
            await self.look_after()
            await asyncio.sleep(CHECK_PERIOD_S)

    async def begin(self) -> None:
        """Take the first places. If all relays fail, they are asked once more."""
        await self.look_after()
        if not self._held and self._failed_at:
            await asyncio.sleep(HURRY_S)
            await self.look_after()

    async def look_after(self) -> None:
        """Check the places that are held, and ask for others where there are too few. Raises nothing."""
        await asyncio.gather(*map(self._check, list(self._held.values())))
        self._tell_if_changed()  # before others are asked, which takes time
        await self._fill()
        self._leave_bootstrap_peers()
        self._tell_if_changed()

    def _tell_if_changed(self) -> None:
        now = self.relays, self.is_regaining
        if now != self._told:
            self._told = now
            self._on_change()

    def close(self) -> None:
        """Hold no places any more; they expire by themselves."""
        for place in self._held.values():
            place.heartbeat.close()
        self._held.clear()

    async def _fill(self) -> None:
        """Ask for places where there are too few, at relays that have not failed just now."""
        if sum(not relay.is_bootstrap for relay in self.relays) >= PLACES:
            return
        known = await self._known_relays()
        failed = {relay.peer_id: self._failed_at.get(relay.peer_id, -math.inf) for relay in known}
        self._failed_at = {peer_id: at for peer_id, at in failed.items() if at > -math.inf}
        failed_before = time.monotonic() - (RETRY_S if self._held else HURRY_S)
        willing = [relay for relay in known if failed[relay.peer_id] <= failed_before]
        # Or those that always fail would be asked again and again, and others never.
        ordered = sorted(order_to_ask(self._own_id, willing, self.relays), key=lambda relay: failed[relay.peer_id])
        others = [relay for relay in ordered if not relay.is_bootstrap]
        bootstrap = [relay for relay in ordered if relay.is_bootstrap]
        await self._ask(others, PLACES - sum(not relay.is_bootstrap for relay in self.relays))
        await self._ask(bootstrap, MIN_PLACES - len(self._held))

    def _leave_bootstrap_peers(self) -> None:
        """Give the places at bootstrap peers up when enough others have proven steady.

        They may expire; connections that came through them go on.
        """
        now = time.monotonic()
        places = list(self._held.values())
        steady = sum(not place.relay.is_bootstrap and now - place.since >= STEADY_S for place in places)
        for place in places:
            if place.relay.is_bootstrap and steady >= MIN_PLACES:
                self._held.pop(place.relay.peer_id).heartbeat.close()

    async def _ask(self, relays: Sequence[Relay], wanted: int) -> None:
        """Ask relays, as many at a time as places are wanted, until there are so many or enough were asked."""
        rest = list(relays[:ASKED_AT_MOST])
        while rest and wanted > 0:
            now, rest = rest[:wanted], rest[wanted:]
            wanted -= sum(await asyncio.gather(*map(self._take, now)))

    async def _take(self, relay: Relay) -> bool:
        """Get a place and try it out; whether that worked."""
        try:
            self._held[relay.peer_id] = await self._enter(await self._connect(relay))
        except (RemoteError, ValueError) as error:
            self.failure = str(error)
            self._failed_at[relay.peer_id] = time.monotonic()
            logger.debug("no place at relay …%s: %s", relay.peer_id[-6:], error)
            return False
        logger.debug("relay …%s carries connections to this peer", relay.peer_id[-6:])
        return True

    async def _enter(self, relay: Relay, losses: int = 0) -> _Place:
        """A place at a relay to which there is a connection. Raises `RemoteError`."""
        heartbeat = await Heartbeat.open(self._p2p, PeerID.from_base58(relay.peer_id), RELAY_TIMEOUT_S)
        try:
            renew_at = await self._reserve(relay)
            await heartbeat.beat(RELAY_TIMEOUT_S)
            prove_at = await self._prove(relay, heartbeat)
        except BaseException:
            heartbeat.close()
            raise
        now = time.monotonic()
        return _Place(relay, heartbeat, renew_at, prove_at, now + BEAT_PERIOD_S, now, losses)

    async def _check(self, place: _Place) -> None:
        now, relay = time.monotonic(), place.relay
        try:
            if place.heartbeat.has_ended:
                raise PeerLost("the connection has ended")
            if now >= place.beat_at:
                await place.heartbeat.beat(BEAT_TIMEOUT_S)
                place = replace(place, beat_at=now + BEAT_PERIOD_S)
            if now >= place.renew_at:
                place = replace(place, renew_at=await self._reserve(relay))
            if now >= place.prove_at or relay.peer_id in self._doubted:
                place = replace(place, prove_at=await self._prove(relay, place.heartbeat))
            self._held[relay.peer_id] = place
        except RemoteError as error:
            logger.debug("relay …%s: %s; connecting again", relay.peer_id[-6:], error)
            place.heartbeat.close()
            del self._held[relay.peer_id]
            self._regaining += 1
            self._tell_if_changed()
            try:
                await self._regain(place, error)
            finally:
                self._regaining -= 1

    async def _regain(self, place: _Place, error: RemoteError) -> None:
        """Get a place again where one was lost with its connection, or give it up."""
        relay, losses = place.relay, 1 if time.monotonic() - place.since >= STEADY_S else place.losses + 1
        try:
            if losses >= MAX_LOSSES:
                raise PeerLost(f"relay …{relay.peer_id[-6:]} was lost {losses} times in a short time")
            await self._reconnect(relay)
            self._held[relay.peer_id] = await self._enter(relay, losses)
            logger.info("Relay …%s was lost, and is used again: %s", relay.peer_id[-6:], error)
        except RemoteError as failure:
            logger.info("Relay …%s is lost: %s", relay.peer_id[-6:], error)
            self.failure = str(failure)
            self._failed_at[relay.peer_id] = time.monotonic()
            await self._disconnect(relay)

    async def _reconnect(self, relay: Relay) -> None:
        """Connect to a relay after it was lost, and have it forget the connections from before. Raises `PeerLost`.

        The relay may not know that these have ended, and would send others over one of them.
        """
        await self._disconnect(relay)  # or the daemon would use the dead connection again
        await self._connect(relay)
        with suppress(RemoteError, TimeoutError):
            async with asyncio.timeout(FORGET_TIMEOUT_S):
                with closing(await self._open_stream(relay.peer_id)) as stream:
                    await stream.send(messages.ForgetConnections())
                    await stream.receive(0)  # nothing comes: the stream ends with the connection
        await self._disconnect(relay)
        await self._connect(relay)

    async def _disconnect(self, relay: Relay) -> None:
        with suppress(P2PDaemonError, OSError, asyncio.IncompleteReadError):
            await self._p2p._client.disconnect(PeerID.from_base58(relay.peer_id))

    async def _reserve(self, relay: Relay) -> float:
        """Reserve a place, or renew it; when to do it again. Raises `RemoteError`."""
        target = PeerID.from_base58(relay.peer_id)
        try:
            seconds = await ask_for_place(self._p2p, target, RELAY_TIMEOUT_S)
        except MembershipNotProven:
            await self._prove_membership(relay)
            seconds = await ask_for_place(self._p2p, target, RELAY_TIMEOUT_S)
        return time.monotonic() + seconds * RENEW_SHARE

    async def _prove_membership(self, relay: Relay) -> None:
        """Prove to a relay of a private swarm that this peer is a member. Raises `RemoteError`."""
        with closing(await self._open_stream(relay.peer_id)) as stream:
            await ask(stream, [])

    async def _prove(self, relay: Relay, heartbeat: Heartbeat) -> float:
        """Prove that a relay carries connections; when to do it again. Raises `RemoteError`."""
        self._doubted.discard(relay.peer_id)  # first, so that a doubt that arises meanwhile counts
        there_and_back = 2 * heartbeat.round_trip_s
        await self._dialer.dial(self._own_id, relay.circuit(), dial_seconds(RELAY_TIMEOUT_S, there_and_back))
        return time.monotonic() + PROVE_PERIOD_S

    async def _connect(self, relay: Relay) -> Relay:
        """Connect to a relay. Returns it with the IP address to which its host name leads. Raises `PeerLost`."""
        try:
            async with asyncio.timeout(RELAY_TIMEOUT_S):
                target = PeerID.from_base58(relay.peer_id)
                await daemon_streams.connect(self._p2p, target, [Multiaddr(relay.address)])
                if is_direct(relay.address):
                    return relay
                found = await daemon_streams.addresses_of(self._p2p, target)
        except (P2PDaemonError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise PeerLost(f"relay …{relay.peer_id[-6:]} cannot be reached: {error or 'it does not answer'}") from None
        resolved = next(filter(is_direct, found), None)
        if resolved is None:
            raise PeerLost(f"relay …{relay.peer_id[-6:]} has no address that others could dial")
        return replace(relay, address=resolved)
