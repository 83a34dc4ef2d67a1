"""Whether each server has computed what this client knows it should have, and which one is to blame if not.

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
    differs     any           P                         LINK: P or A lies. The two are no longer linked; A's session
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

import asyncio
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.client.hops.input_history import Step
from swarm.common.large_payloads import MAX_INLINE_BYTES
from swarm.errors import NotFiniteOutputs, ProtocolViolation

if TYPE_CHECKING:
    from swarm.client.hops.hop_session import HopSession


class Verdict(enum.Enum):
    """What comes of an answer; see the table."""

    RIGHT = "right"
    LIAR = "the server that answered lies"
    LINK = "it or the one before lies about what was pushed"
    NONSENSE = "NaN or infinity, because of it or of the one before"
    AGAIN = "it has a new neighbor, so nothing is proven"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a server has answered.

    Attributes:
        checksum: of the input that it computed, as it says; None if the answer belongs to no step of this client.
        error: why its outputs cannot be used; None if they can.
    """

    checksum: bytes | None
    error: ProtocolViolation | None = None


class InputClaims:
    """The claims of one server that have not been compared with this client's copies yet.

    Attributes:
        was_open: whether another server was ever let into the session.
        open: the claims that are left, by step.

    Args:
        on_change: called when a checksum of this client's has been computed that was asked for before.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self.was_open = False
        self.open: dict[int, Claim] = {}
        self._no_copy_until = -1
        self._on_change = on_change
        self._checksums: dict[int, asyncio.Task[bytes]] = {}
        """Of this client's copies of large payloads, which are computed in a thread."""

    def add(self, number: int, claim: Claim) -> None:
        """The server has answered a step. Only its first answer counts."""
        self.open.setdefault(number, claim)

    def forget_after(self, number: int) -> None:
        """The steps after `number` were given up, or will be sent again."""
        self.open = {step: claim for step, claim in self.open.items() if step <= number}
        for step in [step for step in self._checksums if step > number]:
            self._checksums.pop(step).cancel()

    def on_pusher_replaced(self, last_begun: int) -> None:
        """Copies of the steps up to `last_begun` may come from another server than the one that pushed them."""
        self._no_copy_until = max(self._no_copy_until, last_begun)

    def judge(self, number: int, claim: Claim, copy: Step | None, is_first_hop: bool) -> Verdict | None:
        """What comes of an answer; None if this client's copy of the input, or its checksum, has yet to come."""
        if number <= self._no_copy_until:
            return Verdict.RIGHT if claim.error is None else Verdict.AGAIN
        if claim.checksum is not None:
            own = self._own_checksum(copy) if copy is not None else None
            if own is None:
                return None
            if own == claim.checksum:
                if claim.error is None:
                    return Verdict.RIGHT
                may_be_made = isinstance(claim.error, NotFiniteOutputs) and not is_first_hop
                return Verdict.NONSENSE if may_be_made else Verdict.LIAR
        return Verdict.LINK if self.was_open else Verdict.LIAR

    def _own_checksum(self, step: Step) -> bytes | None:
        checksum = step.checksum
        if checksum.size <= MAX_INLINE_BYTES or checksum.is_known:
            return checksum.value
        if step.number not in self._checksums:
            work = asyncio.to_thread(lambda: checksum.value)
            task = self._checksums[step.number] = asyncio.get_running_loop().create_task(work)
            task.add_done_callback(lambda _: self._on_checksum(step.number))
        return None

    def _on_checksum(self, number: int) -> None:
        self._checksums.pop(number, None)
        self._on_change()


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


def first_finding(hops: Sequence[HopSession]) -> Finding | None:
    """Compare what can be compared by now; the first answer that is not right. Claims that are right are settled.

    Args:
        hops: in the order of the route.
    """
    checked: float = float("inf")
    for index, hop in enumerate(hops):
        if hop.misled or hop.progress.error is not None:  # those behind it have computed what it said
            return None
        claims = hop.claims.open
        while claims:
            number = min(claims)
            claim = claims[number]
            if number > checked and claim.checksum is not None:
                break
            verdict = hop.claims.judge(number, claim, hop.history.find(number), index == 0)
            if verdict is None:
                break
            if verdict is not Verdict.RIGHT:
                return Finding(index, number, verdict, claim)
            del claims[number]
        checked = min(checked, hop.progress.replied, min(claims) - 1 if claims else hop.progress.replied)
    return None


def checked_up_to(hop: HopSession) -> int:
    """Number of the last step whose input and all before were compared, if the hop was refilled, or there is nothing to
    compare."""
    claims = hop.claims.open
    return min(hop.progress.replied, min(claims) - 1) if claims else hop.progress.replied
