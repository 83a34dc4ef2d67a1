"""Steps whose tokens leave inside the span of a server, by hand and over two servers."""

from __future__ import annotations

import pytest

from swarm.data_structures import Span, StepLayout, WireFormat
from swarm.errors import InvalidOption
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.models.execution.span_pass import StepExits
from swarm.models.exits.span_exits import SpanExits
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor
from swarm.server.config import ExitsOption
from tests.server.conversations import (
    CPU,
    HIDDEN,
    OPEN,
    Client,
    assert_close,
    beside_good_client,
    changed,
    make_model,
    random,
    scenario,
)

WITH_EXITS = changed(OPEN, early_exits=True)
ALWAYS = messages.ExitTerms("similarity", ((2, 0.0), (3, 0.0)))
"""The span is 1:4. Two hidden states of these blocks have a cosine above 0."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> SpanModel:
    return make_model(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(plain) -> SpanModel:
    return plain.with_exits(SpanExits((2, 3)))


async def ask_step(client: Client, cache: SessionCache, exits=None, left=None) -> tuple[messages.StepReply, StepExits]:
    """A step of one token, whose reply is what the model computes in process."""
    start = cache.lengths[0] if cache.lengths else 0
    hidden = random(1, start)
    request = messages.StepRequest(
        client.steps, [start], [1], WireFormat.NONE, "float32", exits=exits, left=left, epoch=0
    )
    client.steps += 1
    reply, payload = await client.ask(request, encode_tensor(hidden, WireFormat.NONE))
    assert isinstance(reply, messages.StepReply), reply
    step = cache.start_step(hidden, StepLayout((start,), (1,)), StepExits(exits, tuple(left or (0,))))
    advance_steps([(step, 1)])
    step.commit()
    assert_close(decode_tensor(payload, 1, HIDDEN, WireFormat.NONE, "float32", CPU), step.output)
    assert step.exits is not None
    assert reply.left == (list(step.exits.left) if any(step.exits.left) else None)
    return reply, step.exits


@beside_good_client()
async def test_tokens_leave_where_their_client_lets_them(server, model):
    client, cache = await server.client(), SessionCache(model)
    await client.ask(WITH_EXITS)
    found = []
    for exits, left in ((None, None), (ALWAYS, None), (None, None), (ALWAYS, [1]), (None, [1]), (ALWAYS, [0])):
        _, left_now = await ask_step(client, cache, exits, left)
        found.append(left_now.left[0])
    assert found == [0, 2, 0, 1, 1, 2]


@beside_good_client()
async def test_terms_that_a_server_does_not_offer_are_ignored(server, model):
    client, cache = await server.client(), SessionCache(model)
    await client.ask(WITH_EXITS)
    for terms in (
        messages.ExitTerms("softmax", ((2, 0.0),)),
        messages.ExitTerms("classifier", ((2, 0.0),)),
        messages.ExitTerms("similarity", ((1, 0.0), (4, 0.0), (99, 0.0))),
    ):
        reply, _ = await ask_step(client, cache, terms)
        assert reply.left is None


def test_a_server_without_exits_computes_in_full_and_fills(plain):
    async def act(server):
        client, cache = await server.client(), SessionCache(plain)
        await client.ask(WITH_EXITS)
        for left, expected in ((None, None), ([1], [1]), (None, None)):
            reply, _ = await ask_step(client, cache, ALWAYS, left)
            assert reply.left == expected

    scenario(plain, act)


@beside_good_client()
async def test_no_token_leaves_unasked(server):
    client = await (await server.client()).begin()
    payload = encode_tensor(random(1), WireFormat.NONE)
    for fields in ({"exits": ALWAYS}, {"left": [1]}, {"left": [0]}):
        await client.refused("exit_refused", changed(client.next_step(), **fields), payload)
    await client.right_step()
    other = await server.client("other")
    await other.ask(WITH_EXITS)
    for fields in ({"left": [2]}, {"counts": [2], "exits": ALWAYS}):
        await other.refused("exit_refused", changed(other.next_step(), **fields), payload)
    await other.refused("wrong_shape", changed(other.next_step(), left=[0, 0]), payload)


@beside_good_client()
async def test_a_reply_that_is_given_again_says_the_same(server):
    client = await server.client()
    await client.ask(WITH_EXITS)
    payload = encode_tensor(random(1), WireFormat.NONE)
    request = changed(client.next_step(), exits=ALWAYS)
    first = await client.ask(request, payload)
    assert first[0].left == [2]
    assert await client.ask(request, payload) == first


def test_exits_that_a_span_can_offer():
    for text, span, blocks in [
        ("all", Span(0, 4), (1, 2, 3, 4)),
        ("all", Span(4, 12), (5, 6, 7, 8, 9, 10, 11)),
        ("4,8", Span(0, 8), (4, 8)),
        ("8, 4,4", Span(4, 12), (8,)),
        ("4,8", Span(8, 12), ()),
    ]:
        option = ExitsOption.parse(text)
        option.require_inside(12)
        assert option.within(span, 12) == blocks


def test_what_is_no_exit():
    for text in [
        "",
        "4,",
        "0",
        "-1",
        "4;8",
        "4:8",
        "four",
        "²",
        "4,0",
    ]:
        with pytest.raises(InvalidOption, match="use all, or numbers of blocks"):
            ExitsOption.parse(text)
