"""The line of a worker, and the proof that a starter has it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import PairedWithAnother, WorkerLineError, WrongSecret
from swarm.protocol.messages import WorkerChallenge
from swarm.protocol.messages.peers import MAX_ADDRESSES
from swarm.ring.pairing import (
    LINE_PREFIX,
    WorkerLine,
    answer_challenge,
    new_nonce,
    new_secret,
    parse_line,
    proof,
    require_proof,
    require_same_lock,
    require_starter,
)

WORKER, STARTER, OTHER = "QmWorker", "QmStarter", "QmAnother"
LINE = WorkerLine(WORKER, "kitchen", ("/ip4/192.168.1.7/tcp/4321",), bytes(range(16)))

lines = st.builds(
    WorkerLine,
    peer_id=st.from_regex(r"\A[1-9A-HJ-NP-Za-km-z]{1,128}\Z"),
    name=st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=64),
    addresses=st.lists(st.from_regex(r"\A/[!-~]{0,100}\Z"), min_size=1, max_size=MAX_ADDRESSES).map(tuple),
    secret=st.none() | st.binary(min_size=16, max_size=16),
)


@given(lines)
def test_a_line_comes_back_as_it_was(line):
    text = line.to_line()
    assert parse_line(f"  {text}\n") == line
    assert text.isprintable()
    assert " " not in text


@given(lines, st.data())
def test_a_line_that_was_cut_is_not_taken(line, data):
    text = line.to_line()
    kept = data.draw(st.integers(0, len(text) - 2))
    with pytest.raises(WorkerLineError):
        parse_line(text[:kept])


@given(st.text(max_size=200) | st.text("ABCabc019-_", max_size=200).map(LINE_PREFIX.__add__))
def test_what_is_no_line_is_refused_without_being_repeated(text):
    with pytest.raises(WorkerLineError) as error:
        parse_line(text)
    body = text.strip().removeprefix(LINE_PREFIX)
    assert len(body) < 12 or body not in str(error.value)


def test_worker_and_starter_have_the_same_lock():
    require_same_lock(LINE, is_member=False)
    require_same_lock(replace(LINE, secret=None), is_member=True)
    with pytest.raises(WorkerLineError, match="--membership"):
        require_same_lock(replace(LINE, secret=None), is_member=False)
    with pytest.raises(WorkerLineError, match="not a member"):
        require_same_lock(LINE, is_member=True)


def test_whoever_has_the_line_proves_it():
    challenge = WorkerChallenge(new_nonce())
    request = answer_challenge(challenge, LINE, STARTER, "laptop")
    assert request.name == "laptop"
    require_proof(request, challenge, LINE.secret, WORKER, STARTER)


def test_a_proof_is_for_one_stream_between_two_peers():
    for wrong in ["secret", "challenge", "worker", "starter", "nonce", "empty"]:
        challenge = WorkerChallenge(new_nonce())
        request = answer_challenge(challenge, LINE, STARTER, "")
        if wrong == "nonce":
            request = type(request)(new_nonce(), request.proof, "")
        if wrong == "empty":
            request = type(request)(request.nonce, b"", "")
        with pytest.raises(WrongSecret, match="copy the line"):
            require_proof(
                request,
                WorkerChallenge(new_nonce()) if wrong == "challenge" else challenge,
                new_secret() if wrong == "secret" else LINE.secret,
                OTHER if wrong == "worker" else WORKER,
                OTHER if wrong == "starter" else STARTER,
            )


@given(
    st.lists(st.binary(max_size=4), min_size=2, max_size=2), st.lists(st.text("ab", max_size=3), min_size=2, max_size=2)
)
def test_no_two_conversations_have_the_same_proof(nonces, ids):
    secret = bytes(16)
    moved = proof(secret, nonces[0] + b"x", nonces[1], *ids), proof(secret, nonces[0], b"x" + nonces[1], *ids)
    assert moved[0] != moved[1]


def test_a_worker_has_one_starter():
    require_starter(None, STARTER)
    require_starter(STARTER, STARTER)
    with pytest.raises(PairedWithAnother, match="swarm worker --forget"):
        require_starter(STARTER, OTHER)
