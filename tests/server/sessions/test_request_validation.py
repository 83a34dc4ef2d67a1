from __future__ import annotations

import asyncio
import itertools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import Span, StepLayout, WireFormat
from swarm.errors import ExitRefused, NotFinite, RequestRefused, TooLong, WrongDtype, WrongShape, WrongSpan
from swarm.protocol import messages
from swarm.protocol.compression import payload_bytes
from swarm.server.sessions.request_validation import RequestLimits, RequestValidator

HIDDEN, HELD, POSITIONS, TOKENS = 8, Span(2, 5), 20, 50

STEP = messages.StepRequest(0, [0, 4], [2, 1], WireFormat.NONE, "float32", [1, 0], [5, 0])
REPLAY = messages.ReplayRequest(0, [0, 4], [2, 1], WireFormat.NONE, "float32", [5, 0], True)
BACKWARD = messages.BackwardRequest("main", 2, 5, [2, 1], WireFormat.NONE, "float32", WireFormat.FLOAT16, [5, 0])
FORWARD = messages.ForwardRequest("main", 2, 5, [2, 1], WireFormat.NONE, "float32", WireFormat.NONE, [5, 0])


def checks(positions: int | None = None, tokens: int = TOKENS) -> RequestValidator:
    model: Any = SimpleNamespace(span=HELD, hidden_size=HIDDEN, positions=positions, device=torch.device("cpu"))
    return RequestValidator(model, "main", RequestLimits(step_tokens=tokens, backward_tokens=40))


@given(st.integers(0, 8), st.integers(0, 8), st.sampled_from(["main", "other", ""]))
def test_a_span_is_allowed_if_it_is_held(start, end, revision):
    if 2 <= start < end <= 5 and revision == "main":
        assert checks().validate_span(revision, start, end) == Span(start, end)
    else:
        with pytest.raises(WrongSpan):
            checks().validate_span(revision, start, end)


def test_the_rows_of_each_kind_of_request():
    assert checks().validate_layout(STEP) == StepLayout((0, 4), (2, 1), (1, 0), (5, 0))
    assert checks().validate_layout(REPLAY) == StepLayout((0, 4), (2, 1), None, (5, 0))
    assert checks().validate_layout(FORWARD) == StepLayout((0, 0), (2, 1), None, (5, 0), (7, 1))
    assert checks().validate_layout(BACKWARD) == StepLayout((0, 0), (2, 1), None, (5, 0), (7, 1))


def test_lists_of_different_lengths():
    names = ("starts", "counts", "sources", "offsets", "rope_lengths")
    for message, name in itertools.product((STEP, REPLAY, FORWARD, BACKWARD), names):
        for values in ([0], [0, 0, 0]) if hasattr(message, name) else ():
            with pytest.raises(WrongShape, match="sequences has"):
                checks().validate_layout(msgspec.structs.replace(message, **{name: values}))


@given(st.integers(0, 25), st.integers(0, 25), st.none() | st.integers(0, 25), st.none() | st.just(POSITIONS))
def test_positions_beyond_a_table(start, count, offset, limit):
    message = messages.StepRequest(
        0, [0, start], [1, count], WireFormat.NONE, "float32", None, [0, offset] if offset is not None else None
    )
    if limit is not None and start + count + (offset or 0) > limit:
        with pytest.raises(TooLong, match="sequence 1 reaches position"):
            checks(limit).validate_layout(message)
    else:
        assert checks(limit).validate_layout(message).starts == (0, start)


EXITS = messages.ExitTerms("softmax", ((3, 0.5),))
DECODE = msgspec.structs.replace(STEP, counts=[1, 0], exits=EXITS)


def test_steps_that_let_tokens_leave():
    for left in (None, [0, 0], [1, 0], [2, 0]):
        checks().validate_exits(msgspec.structs.replace(DECODE, left=left), HELD, True)
    checks().validate_exits(STEP, HELD, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"left": [3, 0]}, "sequence 0 brings 1 tokens and left in front of block 3; blocks 2:5 are computed here"),
        ({"left": [0, 2]}, "sequence 1 brings 0 tokens and left in front of block 2"),
        ({"counts": [1, 2]}, "a sequence brings 2 tokens"),
        ({"counts": [1, 2], "exits": None, "left": [0, 0]}, "a sequence brings 2 tokens"),
    ],
)
def test_tokens_that_cannot_have_left(changes, message):
    with pytest.raises(ExitRefused, match=message):
        checks().validate_exits(msgspec.structs.replace(DECODE, **changes), HELD, True)


@given(
    st.integers(-1, TOKENS + 1),
    st.sampled_from(WireFormat),
    st.sampled_from(["float32", "bfloat16", "float16", "int8", ""]),
    st.integers(-2, 2),
    st.booleans(),
)
def test_a_payload_passes_only_if_everything_about_it_is_right(tokens, wire, dtype, more, nan):
    known = dtype in ("float32", "bfloat16", "float16")
    length = payload_bytes(max(tokens, 0) * HIDDEN, wire, dtype) if known else 100
    payload = (b"\xff" if nan else b"\0") * max(0, length + more)
    wrong: type[RequestRefused] | None = None
    if not 0 < tokens <= TOKENS:
        wrong = TooLong
    elif not known:
        wrong = WrongDtype
    elif more:
        wrong = WrongShape
    elif nan:
        wrong = NotFinite
    if wrong is None:
        asyncio.run(checks().validate_payload(tokens, wire, dtype, payload))
    else:
        with pytest.raises(wrong):
            asyncio.run(checks().validate_payload(tokens, wire, dtype, payload))


@given(st.integers(1, 10**6), st.sampled_from(WireFormat), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_no_step_that_would_pass_is_cut_off_as_too_large_a_frame(tokens, wire, dtype):
    limit = checks(tokens=tokens).max_payload
    assert payload_bytes(tokens * HIDDEN, wire, dtype) <= limit
    assert limit >= messages.MAX_PROBE_BYTES
