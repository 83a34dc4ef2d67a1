"""Where other peers say that they can be dialed."""

from __future__ import annotations

from collections import OrderedDict

from swarm.data_structures import Whereabouts
from swarm.transport.addresses import is_circuit

MAX_PEERS = 8192
"""Peers whose addresses are remembered; those of the peer that was learned of longest ago are forgotten first."""

_NOWHERE = Whereabouts()


class AddressBook:
    """The whereabouts of other peers, learned from their signed announcements.

    Attributes:
        outer_host: IP address under which this peer is seen; empty if it is not known.
    """

    def __init__(self) -> None:
        self.outer_host = ""
        self._known: OrderedDict[str, Whereabouts] = OrderedDict()

    def learn(self, peer_id: str, whereabouts: Whereabouts) -> None:
        """Remember what a peer has announced last."""
        self._known[peer_id] = whereabouts
        self._known.move_to_end(peer_id)
        if len(self._known) > MAX_PEERS:
            self._known.popitem(last=False)

    def may_be_near(self, peer_id: str) -> bool:
        """Whether a peer can be dialed in its own network, which may be this one's."""
        return bool(self._whereabouts(peer_id).lan_addresses)

    def addresses_of(self, peer_id: str) -> tuple[str, ...]:
        """The addresses at which this peer can dial another one, as far as it knows."""
        return self._whereabouts(peer_id).seen_from(self.outer_host)

    def is_hidden(self, peer_id: str) -> bool:
        """Whether a peer is announced at relays only."""
        announced = self._whereabouts(peer_id).addresses
        return bool(announced) and all(map(is_circuit, announced))

    def outer_host_of(self, peer_id: str) -> str:
        """IP address under which a peer says that it is seen."""
        return self._whereabouts(peer_id).outer_host

    def lan_addresses_of(self, peer_id: str) -> tuple[str, ...]:
        """Those of them that are in the network of both."""
        return self._whereabouts(peer_id).lan_from(self.outer_host)

    def _whereabouts(self, peer_id: str) -> Whereabouts:
        return self._known.get(peer_id, _NOWHERE)
