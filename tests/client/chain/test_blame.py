"""Who is to blame where a server has computed something else than its client knows."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.chain.blame import (
    Claim,
    Evidence,
    Finding,
    InputClaims,
    Verdict,
    checked_up_to,
    first_finding,
    verdict,
)
from swarm.errors import NotFiniteOutputs, ProtocolViolation

BAD, NAN = ProtocolViolation("of another shape"), NotFiniteOutputs("not finite")


def test_the_table():
    """Each row of the page's table, for all that it leaves open."""
    for fits, usable, finite, was_open, own in itertools.product([True, False, None], *[[True, False]] * 4):
        if fits is None:
            expected = Verdict.RIGHT if usable else Verdict.AGAIN
        elif not fits:
            expected = Verdict.LINK if was_open else Verdict.LIAR
        elif usable:
            expected = Verdict.RIGHT
        else:
            expected = Verdict.LIAR if own or finite else Verdict.NONSENSE
        assert verdict(Evidence(fits, usable, finite, was_open, own)) is expected


@dataclass
class Hop:
    """A hop as this client sees it: what went in, as far as it knows, and what the server says."""

    peer_id: str
    copy: bytes | None
    claims: InputClaims = field(default_factory=InputClaims)
    replied: int = 0
    is_sound: bool = True

    def own_checksum(self, number: int) -> bytes | None:
        return self.copy


def hops(*known: tuple[bytes | None, Claim | None]) -> list[Hop]:
    """Hops at different servers, of which each pushes to the next, after step 0."""
    found = []
    for index, (copy, claim) in enumerate(known):
        hop = Hop(f"server {index}", copy)
        hop.claims.was_open = index > 0
        if claim is not None:
            hop.claims.add(0, claim)
        found.append(hop)
    return found


def test_what_is_right_is_settled():
    route = hops((b"x", Claim(b"x")), (b"y", Claim(b"y")))
    assert first_finding(route) is None
    assert [hop.claims.first() for hop in route] == [None, None]
    assert [checked_up_to(hop) for hop in route] == [0, 0]


def test_a_copy_that_has_yet_to_come_is_waited_for():
    route = hops((b"x", Claim(b"x")), (None, Claim(b"y")), (b"z", Claim(b"other")))
    assert first_finding(route) is None  # the last one may have computed what the second was made to
    assert [checked_up_to(hop) for hop in route] == [0, -1, -1]
    route[1].copy = b"y"
    assert first_finding(route) == Finding(2, 0, Verdict.LINK, Claim(b"other"))


def test_the_first_that_is_wrong_counts():
    """Those behind it have taken that over in good faith."""
    route = hops((b"x", Claim(b"x")), (b"y", Claim(b"other")), (b"z", Claim(b"another")))
    assert first_finding(route) == Finding(1, 0, Verdict.LINK, Claim(b"other"))
    route[1].is_sound = False
    assert first_finding(route) is None


@pytest.mark.parametrize(("claim", "expected"), [(Claim(b"other"), None), (Claim(None, BAD), Verdict.AGAIN)])
def test_there_is_nothing_to_compare_with_after_the_one_before_was_replaced(claim, expected):
    route = hops((b"x", Claim(b"x")), (b"y", claim))
    route[1].claims.on_pusher_replaced(0)
    found = first_finding(route)
    assert (found.verdict if found is not None else None) is expected
    route[1].claims.forget_after(-1)
    route[1].claims.add(1, Claim(b"other"))
    assert first_finding(route) is None  # not before the step at the first server
    route[0].replied = 1
    assert first_finding(route) == Finding(1, 1, Verdict.LINK, Claim(b"other"))


def test_an_answer_to_no_step_of_this_client_waits_for_nothing():
    route = hops((b"x", None), (None, Claim(None, BAD)))
    route[0].replied = -1
    assert first_finding(route) == Finding(1, 0, Verdict.LINK, Claim(None, BAD))


def test_steps_that_were_given_up_do_not_matter():
    route = hops((b"x", Claim(b"x")), (b"y", Claim(b"other")))
    route[1].claims.forget_after(-1)
    assert first_finding(route) is None


@dataclass(frozen=True)
class Behavior:
    """What one server does with a step.

    Attributes:
        pushes_other: it pushes something else than it shows.
        claims_other: it says that it has computed something else than came.
        spoils: how its answer cannot be used.
    """

    is_open: bool
    pushes_other: bool = False
    claims_other: bool = False
    spoils: ProtocolViolation | None = None

    @property
    def is_honest(self) -> bool:
        return not (self.pushes_other or self.claims_other or self.spoils)


behaviors = st.builds(Behavior, st.booleans(), st.booleans(), st.booleans(), st.sampled_from([None, None, BAD, NAN]))


@given(st.lists(behaviors | st.builds(Behavior, st.booleans()), min_size=1, max_size=6), st.data())
def test_no_honest_server_is_ever_proven_to_lie(route, data):
    """Whatever the others do, and whatever an honest one makes of what was pushed to it.

    Of the link of which one end lied, one end did lie. If all are honest, nothing is found.
    """
    shown = [b"input 0", *(f"input {index}".encode() for index in range(1, len(route)))]
    came = list(shown)
    for index, one in enumerate(route[:-1], 1):
        # An honest server that was made to compute something else shows just what it pushes.
        if route[index].is_open and one.pushes_other:
            came[index] = b"other " + came[index]
    seen = []
    for index, (one, copy) in enumerate(zip(route, shown, strict=True)):
        got = came[index]
        error = one.spoils
        if error is None and got != copy:
            error = data.draw(st.sampled_from([None, BAD, NAN]))
        hop = Hop(f"server {index}", copy)
        hop.claims.was_open = index > 0 and one.is_open
        hop.claims.add(0, Claim(b"a lie" if one.claims_other else got, error))
        seen.append(hop)
    found = first_finding(seen)
    if found is None:
        return
    assert not all(one.is_honest for one in route)
    accused, before = route[found.index], route[found.index - 1] if found.index else None
    match found.verdict:
        case Verdict.LIAR:
            assert not accused.is_honest
        case Verdict.LINK:
            assert before is not None
            assert not accused.is_honest or before.pushes_other
        case Verdict.NONSENSE:
            assert accused.spoils is NAN
        case _:
            raise AssertionError(found)
