"""Whether each server has computed what this client knows it should have, and which one is to blame if not. Pure.

A is the server that answers a step; P is the one before it, which may have pushed the step to A. The client has P's
copy of A's input, and A's checksum of what A received (`swarm.protocol.input_checksum`). It cannot see what passed
between the two: P may show one thing and push another, or A may lie about what it received. Both look the same, and the
client must not ban one server for what the other may have done. But it can open a new session at A that accepts no
pushes and whose id no other server knows, and send its copy there itself. Then only A can lie.

    checksum    A's answer    possible senders          verdict
    fits        usable        any                       RIGHT
    fits        malformed     any                       LIAR: A had the right input and gives a malformed answer
    fits        not finite    any; the client's input   LIAR: no other server had a part in it
    fits        not finite    any; P's outputs          NONSENSE: A lies, or P's outputs are huge. Another server gets
                                                        the same input; if its answer is not finite either, P is left
                                                        if another server can take its place
    differs     any           this client only          LIAR: A
    differs     any           P, at the same server     LIAR: the server lies either way
    differs     any           P, at another server      LINK: P or A lies. The two are no longer linked; A's session
                                                        begins again, and this client sends its own copy
    no copy     usable        any                       RIGHT: P was replaced in the middle of the step, and its
                                                        successor's copy may differ in the last bits
    no copy     unusable      any                       AGAIN: A's session begins again, and no server is blamed

If P could push, an answer that belongs to no step of this client, or is larger than any could be, counts as `differs`:
an honest P pushes steps of this client only.

Answers are judged in the order of the route and of the steps: servers behind one that has computed something wrong have
computed with its outputs in good faith.

So a mismatch alone never bans a server; that takes proof that no other server could have made up. A server that is only
left is avoided for a few seconds. A liar needs a new neighbor for each lie, and after the second it is no longer linked
at all (`swarm.routing.peer_health`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.client.hops.input_claims import Claim, InputClaims
from swarm.errors import NotFiniteOutputs


class Verdict(enum.Enum):
    """What comes of an answer; see the table."""

    RIGHT = "right"
    LIAR = "the server that answered lies"
    LINK = "it or the one before lies about what was pushed"
    NONSENSE = "NaN or infinity, because of it or of the one before"
    AGAIN = "it has a new neighbor, so nothing is proven"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What this client knows about one answer.

    Attributes:
        fits: whether the checksum is that of this client's copy; None if there is none to compare with.
        usable: whether the outputs can be used.
        finite: whether they would be usable but for NaN or infinity.
        was_open: whether another server could send to the session.
        same_server: whether that was the same server, with the blocks before.
        own_input: whether the input is this client's own, not the outputs of a server.
    """

    fits: bool | None
    usable: bool
    finite: bool
    was_open: bool
    same_server: bool
    own_input: bool


def verdict(seen: Evidence) -> Verdict:
    """Decide which server is to blame."""
    if seen.fits is None:
        return Verdict.RIGHT if seen.usable else Verdict.AGAIN
    if seen.fits:
        if seen.usable:
            return Verdict.RIGHT
        return Verdict.LIAR if seen.finite or seen.own_input else Verdict.NONSENSE
    return Verdict.LINK if seen.was_open and not seen.same_server else Verdict.LIAR


class ClaimingHop(Protocol):
    """What counts of a hop here; see `swarm.client.hops.hop_session.HopSession`."""

    claims: InputClaims

    @property
    def peer_id(self) -> str: ...

    @property
    def replied(self) -> int: ...

    @property
    def is_sound(self) -> bool: ...

    def own_checksum(self, number: int) -> bytes | None: ...


@dataclass(frozen=True, slots=True)
class Finding:
    """An answer that is not right.

    Attributes:
        index: the hop that gave it.
        number: of the step.
    """

    index: int
    number: int
    verdict: Verdict
    claim: Claim


def first_finding(hops: Sequence[ClaimingHop]) -> Finding | None:
    """Compare what can be compared by now; the first answer that is not right. Claims that are right are settled.

    Args:
        hops: in the order of the route.
    """
    checked: float = math.inf
    for index, hop in enumerate(hops):
        if not hop.is_sound:  # it begins again, and those behind it have computed what it said
            return None
        while (found := hop.claims.first()) is not None:
            number, claim = found
            if number > checked and claim.checksum is not None:
                break
            seen = _evidence(hops, index, number, claim)
            if seen is None:
                break
            judged = verdict(seen)
            if judged is not Verdict.RIGHT:
                return Finding(index, number, judged, claim)
            hop.claims.settle(number)
        checked = min(checked, _checked_up_to(hop, found))
    return None


def checked_up_to(hop: ClaimingHop) -> int:
    """Number of the last step whose input and all before were compared, if the hop was refilled, or there is nothing to
    compare."""
    return _checked_up_to(hop, hop.claims.first())


def _checked_up_to(hop: ClaimingHop, first: tuple[int, Claim] | None) -> int:
    return hop.replied if first is None else min(hop.replied, first[0] - 1)


def _evidence(hops: Sequence[ClaimingHop], index: int, number: int, claim: Claim) -> Evidence | None:
    """What is known about an answer; None if this client's copy, or its checksum, has yet to come."""
    hop = hops[index]
    fits: bool | None = False
    if not hop.claims.has_copy(number):
        fits = None
    elif claim.checksum is not None:
        own = hop.own_checksum(number)
        if own is None:
            return None
        fits = own == claim.checksum
    return Evidence(
        fits=fits,
        usable=claim.error is None,
        finite=not isinstance(claim.error, NotFiniteOutputs),
        was_open=hop.claims.was_open,
        same_server=index > 0 and hops[index - 1].peer_id == hop.peer_id,
        own_input=index == 0,
    )
