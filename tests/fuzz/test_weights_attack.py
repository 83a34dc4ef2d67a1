"""What the campaign sends to the protocol of weights: hostile, and judged rightly."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from swarm.errors import PeerLost
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.protocol import messages
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.holder import WeightsHolder
from tests import virtual_time
from tests.fuzz.campaign import batch_random
from tests.fuzz.kinds import Violation
from tests.fuzz.weights_attack import MAX_ANSWER_BYTES, conversation, judged
from tests.memory_hub import stream_pair


def test_a_holder_answers_it_without_an_error_of_others():
    """As holders answer, and everything comes up."""
    seen: Counter[str] = Counter()
    parts = CheckpointParts(open_checkpoint())
    holder, one = WeightsHolder(parts), parts.checkpoint

    async def hear(stream) -> None:
        while True:
            frame = await stream.receive(MAX_ANSWER_BYTES)
            seen[judged(frame.header, len(frame.payload))] += 1

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
            for frame in conversation(random, one.name, one.revision, one.blocks):
                ours._writer.write(frame)
            serving = asyncio.create_task(serve(theirs))
            await asyncio.sleep(1.0)  # it hears what comes
            ours.abort()
            await asyncio.gather(serving, hearing, return_exceptions=True)

    virtual_time.run(scenario)
    expected = {"PartsFound", "PartData", "protocol_violation", "request_refused", "weights_not_shared"}
    assert set(seen) == {*expected, "ended by the attacker"}, seen
    assert not holder._streams


@pytest.mark.parametrize(
    "answer",
    [
        messages.Refusal("server_fault", "it broke"),
        messages.FindParts("model", "main"),
        messages.InfoReply(0, 4, 2**48, 0, "9"),
    ],
)
def test_answers_that_may_not_be_given(answer):
    with pytest.raises(Violation):
        judged(messages.encode(answer), 0)
