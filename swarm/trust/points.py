"""Points: service is repaid with priority, by those who know that it was given. Pure.

Whoever is served signs a *tab*: "OWNER has had so many token-blocks of HOLDER so far" (a token that passed one block is
a token-block). It signs what the server's receipts and its own record agree on, and nothing else. There is no ledger
that all share, and no currency: a server gives priority to the owner of a tab if it has signed the tab itself, so if it
was served, or if somebody vouches for it whom the server owes, or trusts. That is one hop, and no more.

    worth of OWNER here = 2 * what this server's owner has had of it - what it has spent here - what others have spent
                          here on its word

An owner is a key. A server's points belong to its identity, and a client spends the points of the key that it is given
(`Grant`). A new key has nothing, and loses nothing by being new: there are no debts, so leaving a bad name behind gains
nothing; and tabs between keys of one person are worth nothing to others, who owe these keys nothing.

This is the bilateral accounting of Petals, section 4 (points for service, spent on priority) without a third party; one
hop is that of Piatek et al., "One hop reputations for peer to peer file sharing workloads" (NSDI 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from swarm.common.files.atomic_file import read_small
from swarm.errors import PointsFileError, ProtocolViolation
from swarm.protocol.messages import Points, Signed
from swarm.protocol.messages.peers import PeerId
from swarm.transport.identity import Signature
from swarm.trust.receipts import read_signed

CONTRIBUTOR_WEIGHT = 8.0
"""How much more of a busy server a session with points gets than one without."""

REPAID = 2
"""Points for each token-block that was given. Of two owners who serve each other equally, one has always given more; if
service was repaid once, the other would have no points meanwhile."""

EXPOSURE = 1 << 20
"""Token-blocks that a server takes on trust: that an owner may have had without signing a tab for them, before its
points count no more; and for which the word of a voucher counts. About 13,000 tokens of a model of 80 blocks."""

UNSIGNED_HALF_LIFE_S = 6 * 3600.0
"""After this time half of what was not signed is forgiven: a client that crashes cannot sign."""

MAX_OWNERS = 4096
"""Owners that a server knows. For one that it served, or was served by, it forgets the one with which it had least."""

MAX_VOUCHERS = 64
"""Others on whose word one owner can be served."""

GRANT_S = 24 * 3600
"""For how long a client may spend an owner's points without a new grant."""

MAX_FILE_BYTES = 64 << 20

_Total = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Time = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class Tab(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="swarm tab 1"):
    """What `owner` has had of `holder` in all, in token-blocks; signed by `owner`. A larger one replaces it."""

    owner: PeerId
    holder: PeerId
    total: _Total


class Grant(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="swarm grant 1"):
    """`owner` lets the client `spender` spend its points, until a Unix time in seconds; signed by `owner`."""

    owner: PeerId
    spender: PeerId
    until: _Time


Claim = TypeVar("Claim", Tab, Grant)


def sign_claim(claim: Tab | Grant, sign: Callable[[bytes], Signature]) -> Signed:
    """The claim with its owner's signature; `sign` makes that of some bytes."""
    encoded = msgspec.msgpack.encode(claim)
    return Signed(encoded, *sign(encoded))


def read_claim(signed: Signed, kind: type[Claim]) -> Claim:
    """The claim that its owner has signed. Raises `ProtocolViolation` if it is none, or somebody else has signed it."""
    name = kind.__name__.lower()
    claim, signer = read_signed(signed, kind, name)
    if signer != claim.owner:
        raise ProtocolViolation(f"the {name} names {claim.owner}, and is signed by {signer}")
    return claim


@dataclass(frozen=True)
class Spender:
    """A client that may spend points.

    Attributes:
        owner: peer id of their owner.
        tabs: the totals of the tabs that it has shown, by who has signed them.
    """

    owner: str
    tabs: Mapping[str, int]


def read_points(points: Points, client: str, now: float) -> Spender | None:
    """Whose points a client may spend; None if it was allowed to until some time ago.

    Raises `ProtocolViolation` if it shows anything that is not signed, or not for it.
    """
    grant = read_claim(points.grant, Grant)
    tabs = [read_claim(one, Tab) for one in points.tabs]
    if grant.spender != client or any(tab.holder != grant.owner or tab.owner == grant.owner for tab in tabs):
        raise ProtocolViolation(f"what is shown is not for {client}, or not for {grant.owner}")
    return Spender(grant.owner, {tab.owner: tab.total for tab in tabs}) if now < grant.until else None


class Owner(msgspec.Struct):
    """What a server knows of an owner, in token-blocks.

    Attributes:
        given: what this server's owner has had of it, by a tab that it has shown.
        spent: what its clients have had here for that.
        vouched: what clients of others have had here on its word.
        through: of each owner that vouches for it, what its clients have had here on that word.
        served: all that its clients have had here.
        tab: its newest tab for this server.
        signed: the total of that.
        unsigned: what its clients have had here without a tab; negative if they have signed more.
        unsigned_at: the Unix time up to which that has faded.
    """

    given: _Total = 0
    spent: _Total = 0
    vouched: _Total = 0
    through: dict[PeerId, _Total] = msgspec.field(default_factory=dict)
    served: _Total = 0
    tab: Signed | None = None
    signed: _Total = 0
    unsigned: float = 0.0
    unsigned_at: float = 0.0

    @property
    def worth(self) -> int:
        """What it can spend here."""
        return max(0, REPAID * self.given - self.spent - self.vouched)

    @property
    def acknowledged(self) -> int:
        """What it was served and has signed for."""
        return min(self.signed, self.served)

    @property
    def size(self) -> int:
        """What passed between it and this server, or on its word. Nobody can make that up."""
        return self.given + self.served + self.vouched

    def note_unsigned(self, amount: float, now: float) -> None:
        """So much more was not signed; less if negative."""
        faded = self.unsigned * 0.5 ** (max(0.0, now - self.unsigned_at) / UNSIGNED_HALF_LIFE_S)
        self.unsigned, self.unsigned_at = max(-float(EXPOSURE), faded + amount), now


class Ledger:
    """What one server knows of all owners of points.

    Args:
        server: its peer id. It earns nothing by serving its own owner's clients.
        vouchers: owners whose word counts here up to `EXPOSURE` each, even if nothing is owed to them.
        owners: what is known from before.
    """

    def __init__(self, server: str, vouchers: Collection[str] = (), owners: dict[str, Owner] | None = None) -> None:
        self.owners = owners if owners is not None else {}
        self._server = server
        self._vouchers = vouchers

    def account(self, owner: str) -> Owner:
        """What is known of an owner."""
        return self.owners.get(owner) or Owner()

    def credit(self, spender: Spender, now: float) -> int:
        """What a client can spend. Its tab that this server has signed counts from now on.

        The clients of the server's own owner always can, and are not charged: it is their machine.
        """
        own = spender.tabs.get(self._server, 0)
        if spender.owner == self._server:
            return EXPOSURE
        if (known := self._open(spender.owner, own)) is None:
            return 0
        known.given = max(known.given, own)
        known.note_unsigned(0.0, now)
        if known.unsigned > EXPOSURE:
            return 0
        return known.worth + sum(self._through(known, *tab) for tab in spender.tabs.items())

    def charge(self, spender: Spender, amount: int, now: float) -> None:
        """A client was served. It spends what its owner has, and then what others vouch for; the rest was free."""
        if spender.owner == self._server or (known := self._open(spender.owner, amount)) is None:
            return
        known.note_unsigned(amount, now)
        known.served += amount
        own = min(amount, known.worth)
        known.spent += own
        left = amount - own
        for other, total in spender.tabs.items():
            part = min(left, self._through(known, other, total))
            if part:
                self.owners[other].vouched += part
                known.through[other] = known.through.get(other, 0) + part
                left -= part

    def sign(self, tab: Tab, signed: Signed, now: float) -> Signed | None:
        """Keep an owner's tab, if it is the newest; the newest that there is, None if there is no room for it.

        Raises `ProtocolViolation` if it is not for this server.
        """
        if tab.holder != self._server or tab.owner == self._server:
            raise ProtocolViolation(f"a tab of {tab.owner} for {tab.holder} is of no use to {self._server}")
        if (known := self._open(tab.owner, 0)) is None:
            return None
        if tab.total > known.signed:
            known.note_unsigned(known.signed - tab.total, now)
            known.signed, known.tab = tab.total, signed
        return known.tab

    def _through(self, known: Owner, other: str, total: int) -> int:
        """What an owner can spend on the word of another one, which has signed a tab of `total` for it."""
        if other == self._server or (len(known.through) >= MAX_VOUCHERS and other not in known.through):
            return 0
        trusted = EXPOSURE if other in self._vouchers else 0
        voucher = self._open(other, trusted) if trusted else self.owners.get(other)
        if voucher is None:
            return 0
        word = max(0, trusted + REPAID * voucher.given - voucher.spent - voucher.vouched)
        return max(0, min(total - known.through.get(other, 0), word))

    def _open(self, peer: str, amount: int) -> Owner | None:
        """An owner's account, which is opened if there is none. If there is no room, the smallest one is forgotten if
        `amount` is larger; otherwise None."""
        known = self.owners.get(peer)
        if known is None:
            if len(self.owners) >= MAX_OWNERS:
                least = min(self.owners, key=lambda one: self.owners[one].size)
                if self.owners[least].size >= amount:
                    return None
                del self.owners[least]
            known = self.owners[peer] = Owner()
        return known


# Files


class _File(msgspec.Struct, forbid_unknown_fields=True, tag="swarm points 1"):
    owners: Annotated[dict[PeerId, Owner], msgspec.Meta(max_length=MAX_OWNERS)]


def points_path(identity: Path) -> Path:
    """Where a server with this identity file keeps its points."""
    return identity.with_name(f"{identity.name}.points")


def encode_owners(owners: dict[str, Owner]) -> bytes:
    """The content of a file of points."""
    return msgspec.msgpack.encode(_File(owners))


def read_owners(path: Path) -> dict[str, Owner]:
    """What a file of points says; nothing if there is none. Raises `PointsFileError`."""
    try:
        return msgspec.msgpack.decode(read_small(path, MAX_FILE_BYTES), type=_File).owners
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise PointsFileError(f"the points in {path} cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise PointsFileError(
            f"{path} is not a file of points ({error}); move it away to begin without points"
        ) from None
