"""The checksum of what a server has computed."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import WireFormat
from swarm.protocol import messages
from swarm.protocol.input_checksum import input_checksum
from tests.protocol.test_messages import steps

STEP = messages.StepRequest(3, [2, 0], [1, 1], WireFormat.NONE, "float32")
OTHERS = {
    "step": 4,
    "starts": [2, 1],
    "counts": [2, 0],
    "format": WireFormat.FLOAT16,
    "dtype": "bfloat16",
    "sources": [0, 0],
    "offsets": [0, 0],
    "epoch": 3,
    "follows": 2,
    "rope_lengths": [5, 0],
    "exits": messages.ExitTerms("softmax", ((2, 0.5),)),
    "left": [0, 0],
    "exit_block": 2,
}


@given(steps, st.binary(max_size=64))
def test_both_sides_of_a_push_have_the_same(step, payload):
    """The server that pushes knows the step as a message, the client as an object; bytes may lie in any memory."""
    pushed = messages.decode_client(messages.encode(messages.PushRequest("client", bytes(16), step)))
    assert isinstance(pushed, messages.PushRequest)
    checksum = input_checksum(step, payload)
    assert checksum == input_checksum(pushed.step, memoryview(bytearray(b"x" + payload))[1:])
    assert len(checksum) == messages.CHECKSUM_BYTES


def test_every_field_counts():
    assert OTHERS.keys() == set(messages.StepRequest.__struct_fields__)
    found = {input_checksum(msgspec.structs.replace(STEP, **{name: value}), b"x") for name, value in OTHERS.items()}
    assert len(found) == len(OTHERS)
    assert input_checksum(STEP, b"x") not in found


@given(steps, st.binary(min_size=1, max_size=64), st.data())
def test_every_bit_counts(step, payload, data):
    spoilt = bytearray(payload)
    spoilt[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert input_checksum(step, bytes(spoilt)) != input_checksum(step, payload)
    assert input_checksum(step, payload + b"\0") != input_checksum(step, payload)


def test_a_replay_is_no_step():
    step = messages.StepRequest(0, [0], [1], WireFormat.NONE, "float32")
    replay = messages.ReplayRequest(0, [0], [1], WireFormat.NONE, "float32", None, False)
    assert input_checksum(step, b"x") != input_checksum(replay, b"x")
