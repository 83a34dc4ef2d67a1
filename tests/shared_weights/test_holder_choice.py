from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import PeerLost, ProtocolViolation, ServerFault, TooManyDownloads, WeightsNotShared
from swarm.shared_weights.holder_choice import RETRY_S, STALLED_S, HolderChoice

names = st.sampled_from("abcdef")
errors = st.sampled_from([PeerLost, ProtocolViolation, ServerFault, TooManyDownloads, WeightsNotShared])


def choice(*holders: str, liars: set[str] | None = None) -> HolderChoice:
    found = HolderChoice(set() if liars is None else liars)
    found.find(holders)
    return found


def test_liars_and_those_that_share_nothing_are_not_asked_again():
    liars = {"a"}
    chosen = choice("a", "b", "c", "d", liars=liars)
    assert chosen.to_ask(0) == ["b", "c", "d"]
    chosen.note_error("b", ProtocolViolation("it lies"), 0)
    chosen.note_error("c", WeightsNotShared("it does not share"), 0)
    assert chosen.to_ask(1e9) == chosen.possible == ["d"]
    assert liars == {"a", "b"}
    assert chosen.told == "it lies; it does not share"


def test_those_that_failed_are_asked_again_after_a_while():
    chosen = choice("lost", "full", "stalled", "done")
    chosen.note_error("lost", PeerLost("gone"), 0)
    chosen.note_error("full", TooManyDownloads("full"), 0)
    chosen.note_error("stalled", PeerLost("gone"), 0, is_stalled=True)
    chosen.note_end("done")
    assert chosen.to_ask(RETRY_S - 0.1) == []
    assert chosen.to_ask(RETRY_S) == ["lost"]
    assert chosen.to_ask(2 * RETRY_S) == ["lost", "full"]
    assert chosen.to_ask(STALLED_S) == ["lost", "full", "stalled"]


def test_those_that_failed_least_come_first():
    chosen = choice("a", "b", "c")
    for holder in ("a", "a", "b"):
        chosen.note_error(holder, PeerLost("gone"), 0)
    assert chosen.to_ask(100) == ["c", "b", "a"]


def test_who_is_asked_for_the_first_time_since_something_came():
    chosen = choice("a", "b")
    assert chosen.note_asked("a")
    assert not chosen.note_asked("a")
    assert chosen.note_asked("b")
    chosen.note_progress()
    assert chosen.note_asked("a")


def test_a_silent_peer_is_given_up_only_for_others():
    late = STALLED_S + 1
    assert not choice("a").stalled({"a": late}), "it is the only one"
    assert not choice("a", "b").stalled({"a": late - 2, "b": 0.0})
    assert choice("a", "b").stalled({"a": late}) == ["a"], "b has not been asked yet"
    assert choice("a", "b").stalled({"a": late, "b": 0.0}) == ["a"]
    assert not choice("a", "b").stalled({"a": late, "b": late})
    tried = choice("a", "b")
    tried.note_error("b", PeerLost("gone"), 0)
    assert not tried.stalled({"a": late}), "b may be gone for good, and a may be slow"


@given(st.lists(names), st.lists(st.tuples(names, errors, st.floats(0, 100), st.booleans())), st.floats(0, 200))
def test_only_peers_that_are_there_are_asked_each_once(holders, failures, now):
    chosen = choice(*holders)
    for holder, error, when, is_stalled in failures:
        chosen.note_error(holder, error("no"), when, is_stalled)
    asked = chosen.to_ask(now)
    assert len(set(asked)) == len(asked)
    assert set(asked) <= set(chosen.possible)
    bad = {holder for holder, error, _, _ in failures if error in (ProtocolViolation, WeightsNotShared)}
    assert not bad & set(asked)
    assert set(holders) - bad <= set(chosen.possible)
