"""The record of a session: its server and its client come to the same, whatever was given up."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import WireFormat
from swarm.protocol.input_checksum import LaterChecksum, input_checksum
from swarm.protocol.messages import ReplayRequest, StepRequest
from swarm.trust.session_record import KEPT_STEPS, NO_OUTPUTS, SessionRecord, Totals


def step(number: int, tokens: int = 1, epoch: int = 0, follows: int | None = None) -> StepRequest:
    return StepRequest(number, [0], [tokens], WireFormat.NONE, "float32", epoch=epoch, follows=follows)


def replay(next_step: int, start: int = 0, tokens: int = 5) -> ReplayRequest:
    return ReplayRequest(next_step, [start], [tokens], WireFormat.NONE, "float32", None, False)


def given_checksum(number: int) -> bytes:
    return hashlib.sha256(b"given %d" % number).digest()


def add(record: SessionRecord, request: StepRequest, compute: bool = True) -> None:
    outputs = LaterChecksum(request, b"gave %d" % request.step)
    if compute:
        assert outputs.value
    record.add_step(given_checksum(request.step), outputs)


def test_what_one_server_gave_is_what_the_next_was_given():
    """Three steps through two servers: neither root depends on the other server's answers."""
    first, second = SessionRecord(), SessionRecord()
    for number in range(3):
        onward, last = LaterChecksum(step(number), b"between"), LaterChecksum(step(number), b"behind")
        first.add_step(given_checksum(number), onward)
        second.add_step(input_checksum(step(number), b"between"), last)
    one, other = first.totals(2), second.totals(2)
    assert one is not None
    assert other is not None
    assert one.gave == other.given
    assert len({one.given, one.gave, other.gave}) == 3
    assert (one.steps, one.tokens, one.replayed_tokens) == (3, 3, 0)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.booleans()), min_size=1, max_size=120))
def test_steps_that_were_given_up_do_not_count(turns):
    """The server has also computed what its client gave up before it heard the answer."""
    server, client = SessionRecord(), SessionRecord()
    number, stands, epoch = 0, None, 0
    for tokens, given_up, late in turns:
        before = stands
        for _ in range(given_up):
            add(server, step(number, epoch=epoch, follows=before), compute=not late)
            number += 1
        if given_up:
            client.drop_after(-1 if stands is None else stands)
            epoch = number
        request = step(number, tokens, epoch, stands if epoch == number else None)
        add(server, request, compute=not late)
        add(client, request)
        stands, number = number, number + 1
    assert stands is not None
    assert client.last == stands
    assert server.totals(stands) == client.totals(stands)
    totals = client.totals(stands)
    assert totals is not None
    assert (totals.steps, totals.tokens) == (len(turns), sum(tokens for tokens, *_ in turns))


def test_every_step_counts():
    def totals(*numbers: int, tokens: int = 1) -> Totals | None:
        record = SessionRecord()
        for number in numbers:
            add(record, step(number, tokens))
        return record.totals(numbers[-1])

    found = [totals(1, 2, 3), totals(1, 3), totals(2, 1, 3), totals(1, 2, 3, tokens=2), totals(1, 2, 2, 3)]
    assert len(set(found)) == len(found)


def test_a_replay_begins_again():
    record = SessionRecord()
    add(record, step(0))
    record.add_replay(replay(3), given_checksum(7), None)
    record.add_replay(replay(3, start=5, tokens=4), given_checksum(8), b"outputs")
    add(record, step(3, epoch=3, follows=1))
    totals = record.totals(3)
    assert totals is not None
    assert (totals.steps, totals.tokens, totals.replayed_tokens) == (1, 1, 9)
    again = SessionRecord()
    again.add_replay(replay(3), given_checksum(7), None)
    assert again.totals(2) == Totals(
        2,
        replayed_tokens=5,
        given=hashlib.sha256(bytes(32) + given_checksum(7)).digest(),
        gave=hashlib.sha256(bytes(32) + NO_OUTPUTS).digest(),
        is_replay=True,
    )


def test_only_the_newest_are_known():
    record = SessionRecord()
    for number in range(3 * KEPT_STEPS):
        add(record, step(number), compute=number % 2 == 0)
    assert record.totals(3 * KEPT_STEPS - 1) is not None
    assert record.totals(2 * KEPT_STEPS) is not None
    assert record.totals(2 * KEPT_STEPS - 1) is None
    record.clear()
    assert record.last is None
