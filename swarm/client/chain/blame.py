"""Whether each server has computed what this client knows that it should have, and who is to blame if not. Pure.

A is the server that answers a step, P the one before it, which may have pushed the step to A. The client has P's copy
of what goes into A, and A's checksum of what came (`swarm.protocol.input_checksum`). It cannot see what passed between
the two. So where P shows one thing and pushes another, and where A lies about what came, the client sees the same, and
it must not ban a server for what the other may have done. But it can begin a new session at A, into which nobody is let
and whose id nobody else knows, and send its copy there itself. Then only A can lie.

    checksum    A's answer    who could send to A       verdict
    fits        usable        anybody                   RIGHT
    fits        malformed     anybody                   LIAR: A computed the right thing, and answers like that
    fits        not finite    this client, its input    LIAR: nothing else went into it
    fits        not finite    anybody, P's outputs      NONSENSE: A lies, or huge outputs of P make it so. Another
                                                        server is asked; if it says the same, it is P that is left
    differs     any           this client alone         LIAR: A
    differs     any           P, which is A's server    LIAR: it lies either way
    differs     any           P, another server         LINK: P or A. These two are linked no more; A's session begins
                                                        again, and this client sends its own copy
    no copy     usable        anybody                   RIGHT: P was replaced in the middle of the step. What its
                                                        successor shows may differ in the last bits
    no copy     unusable      anybody                   AGAIN: A's session begins again, nobody is blamed

"No copy" is also what there is where the answer does not belong to any step of this client, or is larger than any could
be, if P may have pushed: that counts as `differs`, because an honest P pushes steps of this client only.

Answers are judged in the order of the route, and in the order of the steps: where a server has computed something
wrong, those behind it have done the same in good faith.

So a mismatch alone never bans anybody: that takes a proof which no other server could have made up. A server that
is only left is avoided for a few seconds. A liar that wants
to go on needs a new neighbor each time, and after the second one it is linked with nobody (`swarm.routing.link_trust`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.errors import NotFiniteOutputs, ProtocolViolation


class Verdict(enum.Enum):
    """What comes of an answer; see the table."""

    RIGHT = "right"
    LIAR = "the server that answered lies"
    LINK = "it or the one before lies about what was pushed"
    NONSENSE = "it or the one before computes nonsense"
    AGAIN = "nobody knows"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What this client knows about one answer.

    Attributes:
        fits: whether the checksum is that of this client's copy; None if there is none to compare with.
        usable: whether the outputs are.
        finite: whether they would be usable but for NaN or infinity.
        was_open: whether another server could send to the session.
        same_server: whether that was the server itself, with the blocks before.
        own_input: whether the input is this client's own, not the outputs of a server.
    """

    fits: bool | None
    usable: bool
    finite: bool
    was_open: bool
    same_server: bool
    own_input: bool


def verdict(seen: Evidence) -> Verdict:
    """Who is to blame."""
    if seen.fits is None:
        return Verdict.RIGHT if seen.usable else Verdict.AGAIN
    if seen.fits:
        if seen.usable:
            return Verdict.RIGHT
        return Verdict.LIAR if seen.finite or seen.own_input else Verdict.NONSENSE
    return Verdict.LINK if seen.was_open and not seen.same_server else Verdict.LIAR


@dataclass(frozen=True, slots=True)
class Claim:
    """What a server has answered.

    Attributes:
        checksum: of the input that it computed, as it says; None if the answer does not belong to a step of this
            client.
        error: why its outputs cannot be used; None if they can.
    """

    checksum: bytes | None
    error: ProtocolViolation | None = None


class InputClaims:
    """The claims of one server that have not been compared with this client's copies yet.

    Attributes:
        was_open: whether another server was ever let into the session.
    """

    def __init__(self) -> None:
        self.was_open = False
        self._open: dict[int, Claim] = {}
        self._no_copy_until = -1

    def add(self, number: int, claim: Claim) -> None:
        """The server has answered a step. What it said first counts."""
        self._open.setdefault(number, claim)

    def first(self) -> tuple[int, Claim] | None:
        """The first claim that is left, and its step's number."""
        number = min(self._open, default=None)
        return (number, self._open[number]) if number is not None else None

    def settle(self, number: int) -> None:
        """The claim is right."""
        del self._open[number]

    def forget_after(self, number: int) -> None:
        """The steps behind `number` were given up, or come again."""
        self._open = {step: claim for step, claim in self._open.items() if step <= number}

    def on_pusher_replaced(self, last_begun: int) -> None:
        """Of the steps up to `last_begun`, the copies may come from another server than what was pushed."""
        self._no_copy_until = max(self._no_copy_until, last_begun)

    def has_copy(self, number: int) -> bool:
        """Whether this client's copy of a step is what was pushed."""
        return number > self._no_copy_until


class ClaimingHop(Protocol):
    """What counts of a hop here; see `swarm.client.chain.hop_session.HopSession`."""

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
        checked = min(checked, checked_up_to(hop))
    return None


def checked_up_to(hop: ClaimingHop) -> int:
    """Number of the last step whose input and all before were compared, if the hop was refilled, or there is nothing to
    compare."""
    found = hop.claims.first()
    return hop.replied if found is None else min(hop.replied, found[0] - 1)


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
