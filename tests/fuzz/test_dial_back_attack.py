"""What the campaign sends to the protocol by which peers dial back: hostile, and judged rightly."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from swarm.errors import RemoteError
from swarm.protocol import messages
from swarm.transport.reach.dial_back import DialBack
from tests import virtual_time
from tests.fuzz.campaign import batch_random
from tests.fuzz.dial_back_attack import HOST, hostile_frame, judged
from tests.fuzz.kinds import Violation
from tests.memory_hub import stream_pair

PORT = 5000
PEERS = ["QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"]


def test_it_is_decided_without_an_error_of_others_and_only_the_sender_is_dialed():
    """As peers decide, and everything comes up."""
    seen: Counter[str] = Counter()

    class Dials:
        async def dial(self, peer_id: str, address: str) -> None:
            seen["dialed"] += 1
            assert (peer_id, address.rpartition("/")[0]) == ("attacker", f"/ip4/{HOST}/tcp")

    async def scenario() -> None:
        random, answers = batch_random("frames", 1, 1), DialBack(Dials())
        for _ in range(400):
            ours, theirs = stream_pair("attacker", "judge")
            ours._writer.write(hostile_frame(random, PORT, PEERS))
            ours.close()
            try:
                await answers.serve(theirs, f"/ip4/{HOST}/tcp/50123")
            except RemoteError as error:
                seen[error.code] += 1
                continue
            await asyncio.sleep(2.0)  # a new request may be answered now and then

    virtual_time.run(scenario)
    assert set(seen) == {"dialed", "protocol_violation", "peer_lost"}, seen


def test_answers_that_may_not_be_given():
    for answer in [
        messages.DialBackReply("127.0.0.2", []),
        messages.DialBackReply(HOST, [PORT]),
        messages.Refusal("server_fault", "it broke"),
        messages.LookAgain(),
        messages.InfoReply(0, 4, 2**48, 0, "9"),
    ]:
        with pytest.raises(Violation):
            judged(messages.encode(answer), PORT)
