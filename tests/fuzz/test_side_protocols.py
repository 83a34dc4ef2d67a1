"""What the campaign sends to the protocols of dialing back and of weights: hostile, and judged rightly."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from swarm.errors import PeerLost, RemoteError
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.protocol import messages
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.holder import WeightsHolder
from swarm.transport.reach.dial_back import DialBack
from tests import virtual_time
from tests.fuzz.campaign import batch_random
from tests.fuzz.kinds import Violation
from tests.fuzz.side_protocols import (
    HOST,
    MAX_ANSWER_BYTES,
    dial_back_frame,
    judge_dial_back,
    judge_weights,
    weights_conversation,
)
from tests.memory_hub import stream_pair
from tests.transport.reach.fakes import no_distance

PORT = 5000
PEERS = ["QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"]


def test_dial_back_is_decided_without_an_error_of_others_and_only_the_sender_is_dialed():
    """As peers decide, and everything comes up."""
    seen: Counter[str] = Counter()

    class Dials:
        async def dial(self, peer_id: str, address: str, timeout_s: float) -> None:
            seen["dialed"] += 1
            assert (peer_id, address.rpartition("/")[0]) == ("attacker", f"/ip4/{HOST}/tcp")

    async def scenario() -> None:
        random, answers = batch_random("frames", 1, 1), DialBack(Dials(), no_distance)
        for _ in range(400):
            ours, theirs = stream_pair("attacker", "judge")
            ours._writer.write(dial_back_frame(random, PORT, PEERS))
            ours.close()
            try:
                await answers.serve(theirs, f"/ip4/{HOST}/tcp/50123")
            except RemoteError as error:
                seen[error.code] += 1
                continue
            await asyncio.sleep(2.0)  # a new request may be answered now and then

    virtual_time.run(scenario)
    assert set(seen) == {"dialed", "protocol_violation", "peer_lost"}, seen


def test_answers_to_dial_back_that_may_not_be_given():
    for answer in [
        messages.DialBackReply("127.0.0.2", []),
        messages.DialBackReply(HOST, [PORT]),
        messages.Refusal("server_fault", "it broke"),
        messages.LookAgain(),
        messages.InfoReply(0, 4, 2**48, 0, "9"),
    ]:
        with pytest.raises(Violation):
            judge_dial_back(messages.encode(answer), PORT)


def test_a_holder_answers_it_without_an_error_of_others():
    """As holders answer, and everything comes up."""
    seen: Counter[str] = Counter()
    parts = CheckpointParts(open_checkpoint())
    holder, one = WeightsHolder(parts), parts.checkpoint

    async def hear(stream) -> None:
        while True:
            frame = await stream.receive(MAX_ANSWER_BYTES)
            seen[judge_weights(frame.header, len(frame.payload))] += 1

    async def serve(stream) -> None:
        try:
            await holder.serve(stream)
        except PeerLost:
            seen["ended by the attacker"] += 1
        finally:
            stream.close()

    async def scenario() -> None:
        await holder.prepare()
        random = batch_random("frames", 1, 1)
        for _ in range(300):
            ours, theirs = stream_pair("attacker", "holder")
            hearing = asyncio.create_task(hear(ours))
            for frame in weights_conversation(random, one.name, one.revision, one.blocks):
                ours._writer.write(frame)
            serving = asyncio.create_task(serve(theirs))
            await asyncio.sleep(1.0)  # it hears what comes
            ours.abort()
            await asyncio.gather(serving, hearing, return_exceptions=True)

    virtual_time.run(scenario)
    expected = {"PartsFound", "PartData", "protocol_violation", "request_refused", "weights_not_shared"}
    assert set(seen) == {*expected, "ended by the attacker"}, seen
    assert not holder._streams


def test_answers_about_weights_that_may_not_be_given():
    for answer in [
        messages.Refusal("server_fault", "it broke"),
        messages.FindParts("model", "main"),
        messages.InfoReply(0, 4, 2**48, 0, "9"),
    ]:
        with pytest.raises(Violation):
            judge_weights(messages.encode(answer), 0)
