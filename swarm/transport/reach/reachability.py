"""How others can reach this peer: found out before it is announced, kept up, and found out anew when things change."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace

from hivemind.p2p import P2P, P2PDaemonError
from multiaddr import Multiaddr

from swarm.data_structures import Whereabouts
from swarm.errors import RemoteError
from swarm.protocol.messages.peers import MAX_PORTS
from swarm.transport import addresses
from swarm.transport.reach.address_book import AddressBook
from swarm.transport.reach.dial_back import ask
from swarm.transport.reach.dialer import Dialer
from swarm.transport.reach.hole_punching import HolePuncher
from swarm.transport.reach.notices import Notices
from swarm.transport.reach.reach_estimate import DialReport, Reach, ReachEstimate, judge
from swarm.transport.reach.relay_choice import Relay
from swarm.transport.reach.relay_places import KnownRelays, RelayPlaces
from swarm.transport.stream import FrameStream

logger = logging.getLogger(__name__)

JUDGES = 3
"""Peers that are asked to dial this one back, if so many are known."""

CHECK_PERIOD_S = 60.0
"""How often one peer is asked again. If it says something else than before, others are asked, too."""

WATCH_PERIOD_S = 4.0
"""How often this machine's own addresses are looked at."""

UNANSWERED_TRIES = 3
"""After so many rounds without any answer, a peer believes that it can be reached."""

SETTLE_S = 1.0
"""Pause before the next check where one was called for by something that may not be over yet."""


@dataclass(frozen=True)
class ReachOptions:
    """What is known before anybody is asked.

    Attributes:
        initial_peers: multiaddresses of the initial peers, with their ids.
        announced: addresses that were given by hand; they are believed unless dialing them back fails.
        is_local: this peer is reached from its own machine only, so no peer is asked.
        listens: whether it can be dialed at all; if not, it only wants to know from where it is seen.
    """

    initial_peers: Sequence[str]
    announced: Sequence[str] = ()
    is_local: bool = True
    listens: bool = True


class Reachability:
    """Finds out how others can reach this peer, and sees to it that they can.

    Args:
        p2p: its daemon.
        options: what is known before.
        open_stream: opens a stream on which a peer can be asked to dial back. Raises `RemoteError`.
        known_peers: ids of the peers that it knows.
        serve_dht: has others ask this peer for records, or no longer.
        book: is told from where this peer is seen.

    Attributes:
        reach: how others reach this peer.
        direct_addresses: its own that others can dial, as they have said or as they were given by hand.
        places: its places at relays.
        notices: what peers tell each other about those that cannot be dialed.
        puncher: connects this peer directly to others where one of them, or both, cannot be dialed.
        relay_source: which peers relay, besides the initial peers.
        known: set when it is known for the first time whether and how this peer can be reached.
        changed: called after each change; see `whereabouts` and `is_reachable`.
    """

    def __init__(
        self,
        p2p: P2P,
        options: ReachOptions,
        open_stream: Callable[[str], Awaitable[FrameStream]],
        known_peers: Callable[[], list[str]],
        serve_dht: Callable[[bool], Awaitable[None]],
        book: AddressBook,
    ) -> None:
        self.reach = Reach.DIRECT if options.is_local else Reach.UNKNOWN
        self.relay_source: KnownRelays = _no_relays
        self.known = asyncio.Event()
        self.changed: Callable[[], None] = lambda: None
        self.dialer = Dialer()
        self.places = RelayPlaces(p2p, self.dialer, open_stream, self._relays, self._on_places_changed)
        self.notices = Notices(p2p, _ids(options.initial_peers), open_stream, self._on_notice)
        self.puncher = HolePuncher(
            p2p, open_stream, lambda: {relay.peer_id for relay in self.places.relays}, lambda: self.is_relayed
        )
        self._p2p = p2p
        self._options = options
        self._open_stream = open_stream
        self._known_peers = known_peers
        self._serve_dht = serve_dht
        self._book = book
        self.direct_addresses: tuple[str, ...] = ()
        self._own: tuple[str, ...] = ()
        self._told: tuple[Reach, Whereabouts, bool] | None = None
        self._unanswered = 0
        self._look_again = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._holding: asyncio.Task[None] | None = None
        if options.is_local:
            self.known.set()

    @property
    def is_relayed(self) -> bool:
        """Whether others reach this peer through relays only."""
        return self.reach is Reach.HIDDEN

    @property
    def is_reachable(self) -> bool:
        """Whether others can reach this peer, as far as it knows."""
        return self.reach is Reach.DIRECT or (self.reach is Reach.HIDDEN and bool(self.places.relays))

    @property
    def _needs_relays(self) -> bool:
        """Whether some others, such as those without IPv6, can reach this peer through relays only."""
        return self.reach is Reach.HIDDEN or (
            bool(self.direct_addresses) and all(address.startswith("/ip6/") for address in self.direct_addresses)
        )

    @property
    def may_relay(self) -> bool:
        """Whether others, who have been asked, can dial this peer, so that it can relay for those whom they cannot."""
        return self.reach is Reach.DIRECT and bool(self.direct_addresses)

    @property
    def whereabouts(self) -> Whereabouts:
        """Where others should dial this peer; nothing where it is reached from its own machine only."""
        if self._options.is_local:
            return Whereabouts()
        lan = tuple(address for address in self._own if addresses.is_lan(address))
        relayed = tuple(relay.circuit() for relay in self.places.relays) if self._needs_relays else ()
        direct = tuple(filter(addresses.is_direct, self.direct_addresses))  # libp2p itself resolves names
        return Whereabouts((*direct, *relayed), lan, self._book.outer_host)

    def describe(self) -> str:
        """How others reach this peer, as the end of a sentence."""
        if self._options.is_local:
            return "reached from this machine only, because it listens on a loopback address"
        if self.reach is Reach.UNKNOWN or (self.reach is Reach.DIRECT and not self.direct_addresses):
            return "believed to be reachable: no other peer has said yet whether it can reach this one"
        relays = ", ".join(f"…{relay.peer_id[-6:]}" for relay in self.places.relays)
        if self.reach is Reach.DIRECT:
            through = ", through a port that the router forwards" if self._is_mapped() else ""
            also = (
                f", and through relays ({relays}) from where there is no IPv6" if self._needs_relays and relays else ""
            )
            return f"reached directly{through}, at {', '.join(self.direct_addresses)}{also}"
        if relays:
            return f"reached through relays ({relays}), because a router or firewall lets nothing new in"
        if self.places.is_regaining:
            return "not reached at the moment: it has lost its relays, and connects to them again"
        why = f" ({self.places.failure})" if self.places.failure else ""
        return (
            f"not reached at all: a router or firewall lets nothing new in, and no peer of the swarm relays for it{why}"
        )

    def advise(self) -> str:
        """What would make this peer reached better; empty if nothing would."""
        if self.reach is not Reach.HIDDEN or self.places.is_regaining:
            return ""
        ports = " and ".join(map(str, self._ports_to_forward()))
        better = f"have the router forward TCP port {ports} to this machine (or switch on UPnP), and keep the port"
        return (
            better if self.places.relays else f"{better}; or ask for a peer that is reached directly to join the swarm"
        )

    def start(self) -> None:
        """Find out, and keep finding out, until `close`."""
        if self._options.is_local or not (self._options.listens or self._options.initial_peers):
            self.known.set()  # there is nobody to ask
            return
        loop = asyncio.get_running_loop()
        if not self._options.listens:
            self._tasks = [loop.create_task(self._learn_outer_host())]
        else:
            self._tasks = [loop.create_task(self._run()), loop.create_task(self._watch_own_addresses())]

    def look_again(self) -> None:
        """Something has changed: ask others anew."""
        self._look_again.set()

    async def close(self) -> None:
        """Stop finding out. Places at relays expire by themselves."""
        tasks = [*self._tasks, *([self._holding] if self._holding is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.places.close()
        await self.notices.close()
        await self.puncher.close()
        await self.dialer.close()

    async def _run(self) -> None:
        while True:
            self._look_again.clear()
            await self._find_out()
            while not self._look_again.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_PERIOD_S * random.uniform(0.8, 1.2)):
                        await self._look_again.wait()
                if not self._look_again.is_set() and await self._is_contradicted():
                    break
            else:
                await asyncio.sleep(SETTLE_S)

    async def _find_out(self) -> None:
        """Have others dial this peer back, and act on what they say."""
        self._own = await self._own_addresses()
        ports = self._ports()
        peers = self._others()
        reports: list[DialReport] = []
        while peers and len(reports) < JUDGES:
            now, peers = peers[: JUDGES - len(reports)], peers[JUDGES - len(reports) :]
            answers = await asyncio.gather(*(self._ask(peer, ports) for peer in now))
            reports += [answer for answer in answers if answer is not None]
        await self._apply(judge(reports, ports, self._own_hosts()))

    async def _is_contradicted(self) -> bool:
        """Whether a peer that is asked now contradicts what is believed."""
        ports = self._ports()
        for peer in self._others()[:1]:
            report = await self._ask(peer, ports)
            if report is not None:
                verdict = judge([report], ports, self._own_hosts())
                return verdict.reach is not self.reach or verdict.outer_host != self._book.outer_host
        return False

    async def _ask(self, peer_id: str, ports: list[int]) -> DialReport | None:
        try:
            with closing(await self._open_stream(peer_id)) as stream:
                return replace(await ask(stream, ports), is_trusted=peer_id in _ids(self._options.initial_peers))
        except RemoteError as error:
            logger.debug("…%s does not say whether it can reach this peer: %s", peer_id[-6:], error)
            return None

    async def _apply(self, verdict: ReachEstimate) -> None:
        if verdict.outer_host:
            self._book.outer_host = verdict.outer_host
        if verdict.reach is not Reach.UNKNOWN:
            self.reach = verdict.reach
            self.direct_addresses = verdict.addresses
            if self._options.announced and not self._is_denied(verdict):
                self.reach, self.direct_addresses = Reach.DIRECT, tuple(self._options.announced)
        elif self.reach is Reach.UNKNOWN:
            self._unanswered += 1
            if self._others() and self._unanswered < UNANSWERED_TRIES:
                self.look_again()
                return
            self.reach = Reach.DIRECT  # as the first peer of a swarm, where none could say otherwise
        if self._needs_relays:
            await self._hold_places()
        elif self._holding is not None:
            self._holding.cancel()
            self._holding = None
        # The first peer of a swarm is the one by which others find the swarm, whatever strangers say of it.
        await self._serve_dht(self.reach is Reach.DIRECT or not self._options.initial_peers)
        self.known.set()
        self._tell_if_changed()

    def _tell_if_changed(self) -> None:
        now = self.reach, self.whereabouts, self.places.is_regaining
        if now != self._told:
            self._told = now
            self._say()
            self.changed()

    def _say(self) -> None:
        advice = self.advise()
        logger.info("This peer is %s%s", self.describe(), f". To be reached directly, {advice}" if advice else "")

    def _is_denied(self, verdict: ReachEstimate) -> bool:
        """Whether the addresses given by hand are those that were dialed back in vain."""
        hosts = {addresses.host_part(address) for address in self._options.announced}
        return verdict.reach is Reach.HIDDEN and verdict.outer_host in hosts

    async def _hold_places(self) -> None:
        """Look after places at relays from now on; returns when it is known whether there are any."""
        if self._holding is None:
            await self.places.begin()
            self._holding = asyncio.get_running_loop().create_task(self.places.run())

    def _on_notice(self) -> None:
        logger.debug("a peer has failed to dial this one")
        self.places.doubt()
        self.look_again()

    def _on_places_changed(self) -> None:
        if self._holding is not None:
            self.look_again()  # if the network has changed, more than a relay has
            self._tell_if_changed()

    async def _relays(self) -> list[Relay]:
        """All relays that are known, each once."""
        found = {relay.peer_id: relay for relay in _bootstrap_relays(self._options.initial_peers)}
        found |= {relay.peer_id: relay for relay in await self.relay_source()}
        found.pop(self._p2p.peer_id.to_base58(), None)
        return list(found.values())

    def _others(self) -> list[str]:
        """Peers that can be asked: the initial peers first, then any that are known, in random order."""
        initial = _ids(self._options.initial_peers)
        known = self._known_peers()
        random.shuffle(known)
        return list(dict.fromkeys([*initial, *known]))[: 2 * JUDGES]

    def _ports(self) -> list[int]:
        """The TCP ports at which this peer may be reached, those of public addresses first."""
        given = [*self._options.announced, *addresses.sort_by_reach(self._own)]
        found = (Multiaddr(address) for address in given)
        return list(dict.fromkeys(int(address["tcp"]) for address in found if "tcp" in address))[:MAX_PORTS]

    def _own_hosts(self) -> set[str]:
        """The IP addresses of this machine."""
        return {addresses.host_part(address) for address in self._own}

    def _is_mapped(self) -> bool:
        """Whether a router forwards what is dialed, as it was set up by hand, or asked by the daemon."""
        if not set(self.direct_addresses) & {*self._own, *self._options.announced}:
            return True
        outside = {addresses.port_part(one) for one in self.direct_addresses if one.startswith("/ip4/")}
        behind = {addresses.port_part(one) for one in self._own if one.startswith("/ip4/") and addresses.is_lan(one)}
        return bool(outside and behind) and not outside & behind

    def _ports_to_forward(self) -> list[int]:
        """The TCP ports of this machine at which it is reached if its router lets that in."""
        behind = [address for address in self._own if address.startswith("/ip4/") and addresses.is_lan(address)]
        return list(dict.fromkeys(map(addresses.port_part, behind))) or self._ports()

    async def _own_addresses(self) -> tuple[str, ...]:
        """Where the daemon listens, and where the router forwards a port to it, without those of this machine only."""
        try:
            _, found = await self._p2p._client.identify()
        except (P2PDaemonError, OSError, asyncio.IncompleteReadError) as error:
            logger.debug("the daemon did not tell its addresses: %s", error)
            return self._own
        return tuple(sorted(one for one in map(str, found) if addresses.is_direct(one)))

    async def _watch_own_addresses(self) -> None:
        await self.known.wait()
        while True:
            await asyncio.sleep(WATCH_PERIOD_S)
            if await self._own_addresses() != self._own:
                self.look_again()

    async def _learn_outer_host(self) -> None:
        """Ask one peer from where this one is seen, so that it finds peers in its own network."""
        for peer in self._others():
            report = await self._ask(peer, [])
            if report is not None:
                self._book.outer_host = report.host
                break
        self.known.set()


def _ids(peers: Sequence[str]) -> list[str]:
    """The ids of the initial peers."""
    return [address.rpartition("/p2p/")[2] for address in peers]


def _bootstrap_relays(initial_peers: Sequence[str]) -> list[Relay]:
    """The initial peers, as far as they are dialed at an address of their own."""
    split = (address.rpartition("/p2p/") for address in initial_peers)
    return [Relay(peer_id, address, True) for address, _, peer_id in split if address and "/p2p/" not in address]


async def _no_relays() -> list[Relay]:
    return []
