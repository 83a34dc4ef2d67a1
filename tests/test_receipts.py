"""Receipts of real sessions, over real processes: signed, compared, kept where servers leave, and refused if wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from swarm.errors import ProtocolViolation
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.protocol import messages
from swarm.trust.receipts import read_receipt, read_receipts, report_on, write_receipts
from tests.bad_peers import start_bad_server
from tests.disturbances import demo_prompt, demo_text, greedy, holder
from tests.swarms import TestSwarm, run_client, run_swarm

SPANS = ("0:4", "4:8", "8:12")
NEW = 12


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return demo_prompt()


@pytest.fixture(scope="module")
def expected(prompt) -> list[int]:
    return demo_text(prompt, NEW)


@pytest.fixture(scope="module")
def swarm() -> Iterator[TestSwarm]:
    with run_swarm(DEMO_FOLDER, SPANS, dtype="float32", throughput=40.0) as swarm:
        yield swarm


def test_a_route_vouches_for_its_text(swarm, prompt, expected, tmp_path):
    """All servers sign what they have computed, one from the other's outputs; a rollback is no obstacle."""
    with run_client(swarm, dtype="float32") as model, model.inference_session(max_length=64) as session:
        assert session.receipts() == ()
        assert greedy(model, prompt, NEW) == expected
        first = session.receipts()
        session.position = prompt.shape[1]
        assert greedy(model, torch.tensor([[*prompt[0].tolist(), *expected[:3]]]), 2) == expected[3:5]
        receipts = session.receipts()
        peers = [hop.server.peer_id for hop in session.route.hops]
    statements = [read_receipt(receipt) for receipt in receipts]
    assert [one.server for one in statements] == peers
    assert [str(one.span) for one in statements] == list(SPANS)
    assert {one.client for one in statements} == {model.swarm._peer.peer_id}
    path = tmp_path / "receipts.json"
    write_receipts(path, receipts)
    report = report_on(read_receipts(path))
    assert (report.problems, report.notes) == ((), ())
    earlier = [read_receipt(receipt) for receipt in first]
    assert all(one.tokens == prompt.shape[1] + NEW - 1 for one in earlier)
    assert all(now.tokens > before.tokens for now, before in zip(statements, earlier, strict=True))


def test_a_server_that_leaves_signs_before(swarm, prompt, expected):
    leaving = swarm.start("4:8", dtype="float32", throughput=4000.0).wait_ready()
    with run_client(swarm, dtype="float32") as model:
        session = model.inference_session(max_length=64, keep_receipts=True)
        with session:
            assert greedy(model, prompt, 4) == expected[:4]
            assert holder(swarm, session, 4) is leaving
            leaving.stop()
            text = torch.tensor([[*prompt[0].tolist(), *expected[:4]]])
            assert greedy(model, text, 4) == expected[4:8]
            assert holder(swarm, session, 4) is not leaving
        found = [read_receipt(receipt) for receipt in session.receipts()]
    assert found[0].server == leaving.peer_id
    assert found[0].tokens == prompt.shape[1] + 3
    assert sorted(str(one.span) for one in found[1:]) == list(SPANS)
    (successor,) = [one for one in found[1:] if str(one.span) == "4:8"]
    assert successor.replayed_tokens == prompt.shape[1] + 3


def forged(message: Any, payload: Any) -> Any:
    return msgspec.structs.replace(message, signature=message.signature[::-1]), payload


class Replayed:
    """It answers every request with the first receipt that it ever signed."""

    def __init__(self) -> None:
        self.first: messages.Message | None = None

    def __call__(self, message: messages.Message, payload: Any) -> Any:
        self.first = self.first or message
        return self.first, payload


def nothing_right(message: Any, payload: Any) -> Any:
    return messages.Receipt(b"\x00" * 2048, b"ssh-rsa AAAA", b"====="), payload


def is_receipt(message: messages.Message) -> bool:
    return isinstance(message, messages.Receipt)


@pytest.mark.parametrize(
    ("lie", "why"),
    [(forged, "signature"), (Replayed(), "differs from this client's record"), (nothing_right, "not a receipt")],
    ids=["forged", "replayed", "garbage"],
)
def test_a_wrong_receipt_costs_its_server_the_session(swarm, prompt, expected, lie, why):
    bad = start_bad_server(swarm, "4:8", lie, is_receipt)
    try:
        with run_client(swarm, dtype="float32") as model, model.inference_session(max_length=64) as session:
            text = greedy(model, prompt, 4)
            assert text == expected[:4]
            assert holder(swarm, session, 4) is bad
            if why.startswith("differs"):
                session.receipts()  # the first is right
                text += greedy(model, torch.tensor([[*prompt[0].tolist(), *text]]), 2)
            with pytest.raises(ProtocolViolation, match=why):
                session.receipts()
            text += greedy(model, torch.tensor([[*prompt[0].tolist(), *text]]), NEW - len(text))
            assert text == expected
            assert holder(swarm, session, 4) is not bad
            assert len(session.receipts()) == len(SPANS)
    finally:
        bad.kill()
