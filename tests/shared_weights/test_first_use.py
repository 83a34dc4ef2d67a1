"""A model of which nothing is here but what peers say and send, with liars and silent ones among them."""

from __future__ import annotations

import asyncio
import time

import pytest

from swarm.errors import UnknownWeights, WeightsUnavailable
from swarm.protocol import messages
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.fetcher import MAX_HOLDERS
from swarm.shared_weights.holder_stream import FIND_TIMEOUT_S
from swarm.shared_weights.manifest import CLIENT, FILES, all_parts
from swarm.shared_weights.peer_model import PeerModel
from swarm.shared_weights.trust import TrustedParts, trusted_at_first_use, trusted_by_file
from tests import virtual_time
from tests.shared_weights import bad_holders as bad
from tests.shared_weights.peers import BLOCKS, NAME, make_checkpoint, network

PARTS = all_parts(BLOCKS)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Other weights of the same revision."""
    found = CheckpointParts(make_checkpoint(tmp_path_factory.mktemp("other") / "model", seed=1))
    found.manifests()
    return found


async def silent(stream):
    await stream.discard_incoming()


def with_peers(scenario, **handlers) -> float:
    """Run a scenario with a way to open streams, and one to find the peers; how long it took."""
    took: list[float] = []

    async def whole() -> None:
        async with network() as swarm:
            for name, handler in handlers.items():
                await swarm.add(name, handler)
            began = time.monotonic()
            await scenario(lambda peer: swarm.hub.connect("receiver", peer), swarm.find)
            took.append(time.monotonic() - began)

    virtual_time.run(whole)
    return took[0]


def trusted(parts: CheckpointParts, names=PARTS) -> TrustedParts:
    digests = parts.manifests().digests
    return TrustedParts(parts.checkpoint.revision, BLOCKS, {name: digests[name] for name in names})


def test_what_all_say_is_pinned_and_silent_ones_are_not_waited_for_one_after_the_other(parts, tmp_path):
    path = tmp_path / "pinned" / "parts.json"

    async def scenario(open_stream, find):
        found = await trusted_at_first_use(NAME, None, open_stream, find, path)
        assert found == trusted(parts)

    half = bad.holder(parts, bad.honest, offered=(FILES, CLIENT))
    rest = bad.holder(parts, bad.honest, offered=("0", "1", "2"))
    silent_ones = {f"silent{number}": silent for number in range(2 * MAX_HOLDERS - 2)}
    assert with_peers(scenario, one=half, two=rest, **silent_ones) <= FIND_TIMEOUT_S + 1
    assert trusted_by_file(NAME, path) == trusted(parts)


def test_no_more_peers_are_asked_than_are_needed(parts):
    asked = 0

    async def counted(stream):
        nonlocal asked
        asked += 1
        await bad.holder(parts, bad.honest)(stream)

    async def scenario(open_stream, find):
        await trusted_at_first_use(NAME, None, open_stream, find, None)

    with_peers(scenario, **{f"peer{number}": counted for number in range(50)})
    assert asked == 2 * MAX_HOLDERS


def test_one_liar_is_enough_for_none_to_be_believed_and_nothing_is_pinned(parts, other, tmp_path):
    path = tmp_path / "parts.json"

    async def scenario(open_stream, find):
        with pytest.raises(UnknownWeights, match="disagree"):
            await trusted_at_first_use(NAME, None, open_stream, find, path)

    honest = {f"honest{number}": bad.holder(parts, bad.honest) for number in range(4)}
    with_peers(scenario, **honest, liar=bad.holder(other, bad.honest))
    assert not path.exists()


def test_what_was_pinned_is_used_though_no_peer_answers_and_is_not_replaced(parts, other, tmp_path):
    path = tmp_path / "parts.json"

    async def first(open_stream, find):
        await trusted_at_first_use(NAME, None, open_stream, find, path)

    async def again(open_stream, find):
        assert await trusted_at_first_use(NAME, None, open_stream, find, path) == trusted(parts)

    async def replaced(open_stream, find):
        with pytest.raises(UnknownWeights):
            await trusted_at_first_use(NAME, None, open_stream, find, path)

    with_peers(first, one=bad.holder(parts, bad.honest))
    pinned = path.read_bytes()
    with_peers(again)
    with_peers(replaced, one=bad.holder(other, bad.honest))
    assert path.read_bytes() == pinned


def test_without_anything_pinned_it_says_what_peers_have_said(parts):
    async def scenario(open_stream, find):
        with pytest.raises(WeightsUnavailable, match="did not answer"):
            await trusted_at_first_use(NAME, None, open_stream, find, None)

    with_peers(scenario, one=silent)


def test_a_model_is_opened_and_liars_are_asked_for_nothing_more(parts, tmp_path):
    asked: list[messages.WeightsMessage] = []

    async def lie(stream, request, right):
        asked.append(request)
        await stream.send(messages.PartData(), bad.flipped(right))

    async def scenario(open_stream, find):
        async def learn():
            return trusted(parts)

        opened = await PeerModel.open(NAME, learn, open_stream, find, tmp_path)
        assert opened.checkpoint.name == NAME
        assert opened.checkpoint.blocks == BLOCKS
        assert set(opened.checkpoint.weight_map) == set(parts.checkpoint.weight_map)
        lies = len(asked)
        await opened.require(PARTS)
        assert len(asked) == lies, "it was not asked again"
        received = opened.received
        assert received.block_digests(0, BLOCKS) == parts.checkpoint.block_digests(0, BLOCKS)

    with_peers(scenario, liar=bad.holder(parts, lie), honest=bad.holder(parts, bad.honest))
    assert asked


def test_what_is_learned_later_has_to_agree_with_what_was_known(parts, other, tmp_path):
    """At 257aae6 it took the place of what was known, also that of another revision."""
    said = [trusted(parts, (FILES, "0")), trusted(other)]

    async def scenario(open_stream, find):
        async def learn():
            return said.pop(0)

        opened = await PeerModel.open(NAME, learn, open_stream, find, tmp_path)
        await opened.require(["0"])
        with pytest.raises(UnknownWeights):
            await opened.require(["1"])

    with_peers(scenario, one=bad.holder(parts, bad.honest))


def test_parts_that_nobody_had_at_first_are_learned_of_when_they_are_needed(parts, tmp_path):
    said = [trusted(parts, (FILES, "0")), trusted(parts)]

    async def scenario(open_stream, find):
        async def learn():
            return said.pop(0)

        opened = await PeerModel.open(NAME, learn, open_stream, find, tmp_path)
        await opened.require([FILES, "0"])
        assert len(said) == 1
        await opened.require(["1", "1"])
        assert not said
        assert opened.received.block_digests(0, 2) == parts.checkpoint.block_digests(0, 2)

    with_peers(scenario, one=bad.holder(parts, bad.honest))


def test_a_file_that_is_read_is_received_while_the_loop_goes_on(parts, tmp_path):
    """As a compute thread reads it, over a loop of its own."""

    async def scenario():
        async with network() as swarm:
            await swarm.add("one", bad.holder(parts, bad.honest))

            async def learn():
                return trusted(parts)

            def open_stream(peer):
                return swarm.hub.connect("receiver", peer)

            opened = await PeerModel.open(NAME, learn, open_stream, swarm.find, tmp_path)
            (file,) = {opened.checkpoint.weight_map[name] for name in parts.checkpoint.weight_map if ".1." in name}
            with pytest.raises(WeightsUnavailable, match="not here yet"):
                opened.checkpoint.fetch(file)
            assert opened.checkpoint.cached(file) is None
            path = await asyncio.to_thread(opened.checkpoint.fetch, file)
            assert path == opened.checkpoint.cached(file)
            digests = await asyncio.to_thread(opened.checkpoint.block_digests, 1, 2)
            assert digests == parts.checkpoint.block_digests(1, 2)

    asyncio.run(asyncio.wait_for(scenario(), 60))
