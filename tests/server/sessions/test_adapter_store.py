"""The store of adapters, on a clock of its own: whose they are, how much room they take, when they leave."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from swarm.data_structures import Span
from swarm.errors import AdapterRefused, CacheFull, UnknownAdapter, WrongShape
from swarm.models.adapters.block_adapter import BlockAdapterWeights, LoraFactors
from swarm.protocol.adapter_encoding import pack_adapters
from swarm.protocol.messages import BlockAdapterSpec, LoraShape, PutAdapters
from swarm.server.sessions.adapter_store import PART_OVERHEAD_BYTES, AdapterLimits, AdapterStore

SPAN = Span(2, 4)
ROOM = 10
"""Parts of 100 numbers that all peers together may have; one peer has half of it."""

SIZE = PART_OVERHEAD_BYTES + 400
LIMITS = AdapterLimits(rank=8, memory=ROOM * SIZE, peer_share=0.5, versions=3, seconds=60.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock) -> AdapterStore:
    return AdapterStore(clock, LIMITS)


def part(seed: int, numbers: int = 100) -> BlockAdapterWeights:
    return BlockAdapterWeights(torch.full((1, numbers), float(seed)))


def digest(seed: int, numbers: int = 100) -> bytes:
    return pack_adapters([part(seed, numbers)], torch.float32)[0][0].digest


def put(store: AdapterStore, peer: str, seed: int, block: int = 2, numbers: int = 100) -> None:
    store.store(peer, {(block, digest(seed, numbers)): part(seed, numbers)})


def has(store: AdapterStore, peer: str, seed: int, block: int = 2) -> bool:
    names = [digest(seed) if block == here else b"" for here in range(SPAN.start, SPAN.end)]
    try:
        found = store.find(peer, SPAN, names)
    except UnknownAdapter:
        return False
    assert set(found) == {block}
    assert float(found[block].prompt[0, 0]) == seed
    return True


def test_an_adapter_is_found_by_its_block_and_digest(store):
    store.store("me", {(2, digest(1)): part(1), (3, digest(2)): part(2)})
    found = store.find("me", SPAN, [digest(1), digest(2)])
    assert [float(found[block].prompt[0, 0]) for block in (2, 3)] == [1, 2]
    assert store.find("me", SPAN, [b"", b""]) == {}
    assert store.find("me", SPAN, None) == {}
    assert set(store.find("me", SPAN, [b"", digest(2)])) == {3}
    assert set(store.find("me", Span(3, 4), [digest(2)])) == {3}
    with pytest.raises(UnknownAdapter, match=r"of block 2 is not \(or no longer\) kept here; send it again"):
        store.find("me", SPAN, [digest(2), digest(1)])
    with pytest.raises(UnknownAdapter):
        store.find("me", SPAN, [b"short", b""])


@pytest.mark.parametrize("names", [[], [b""], [b""] * 3])
def test_one_digest_a_block(store, names):
    with pytest.raises(WrongShape, match="are named for the 2 blocks"):
        store.find("me", SPAN, names)


def test_nobody_finds_what_another_peer_has(store):
    put(store, "me", 1)
    assert not has(store, "other", 1)
    put(store, "other", 1)
    assert has(store, "other", 1)
    assert has(store, "me", 1)


def test_it_leaves_when_nobody_has_used_it_for_a_while(store, clock):
    put(store, "me", 1)
    put(store, "me", 2)
    clock.now = 50.0
    assert has(store, "me", 1)
    clock.now = 61.0
    store.expire()
    assert (len(store), store.memory) == (1, SIZE)
    assert has(store, "me", 1)
    assert not has(store, "me", 2)
    clock.now += 60.5
    store.expire()
    assert (len(store), store.memory) == (0, 0)


def test_a_peer_loses_its_own_that_it_used_longest_ago(store):
    put(store, "other", 7)
    for seed, block in ((0, 2), (1, 3), (2, 2), (3, 3), (4, 2)):
        put(store, "me", seed, block)
    assert has(store, "me", 0)
    put(store, "me", 5, 3)
    assert [has(store, "me", seed, block) for seed, block in ((0, 2), (1, 3), (2, 2), (5, 3))] == [
        True,
        False,
        True,
        True,
    ]
    assert has(store, "other", 7)


def test_all_together_lose_what_was_used_longest_ago(store):
    for peer in range(ROOM):
        put(store, f"peer {peer}", peer)
    assert has(store, "peer 0", 0)
    put(store, "one more", 77)
    assert [has(store, f"peer {peer}", peer) for peer in (0, 1, 2)] == [True, False, True]
    assert store.memory == ROOM * SIZE


def test_what_somebody_holds_counts_until_it_is_let_go(store, clock):
    """Sessions hold theirs beyond everything."""
    held = []
    for seed in range(5):
        put(store, "me", seed)
        held.append(store.find("me", SPAN, [digest(seed), b""]))
    with pytest.raises(CacheFull, match=r"sessions of this peer hold .* close some"):
        put(store, "me", 5)
    clock.now = 1000.0
    store.expire()
    assert (len(store), store.memory) == (0, 5 * SIZE)
    with pytest.raises(CacheFull):
        put(store, "me", 5)
    held.pop()
    put(store, "me", 5)
    put(store, "other", 1)
    held.clear()
    store.expire()
    assert store.memory == 2 * SIZE


def described(rank: int, inputs: int = 32, prompt: int = 0) -> PutAdapters:
    block = BlockAdapterSpec(bytes(16), prompt, [LoraShape("q", rank, inputs, 32)])
    return PutAdapters(2, [None, block], "float32")


def test_ranks_and_sizes(store):
    store.validate_size(described(8), hidden_size=32)
    with pytest.raises(AdapterRefused, match="has rank 9; this server takes up to 8"):
        store.validate_size(described(9), hidden_size=32)
    with pytest.raises(AdapterRefused, match=r"takes 34 KB; this server takes up to 7\.12 KB from a peer"):
        store.validate_size(described(8, inputs=1000), hidden_size=32)
    with pytest.raises(AdapterRefused, match="takes up to"):
        store.validate_size(described(1, prompt=100), hidden_size=32)
    with pytest.raises(AdapterRefused):
        AdapterStore(Clock(), AdapterLimits(memory=0)).validate_size(described(1), hidden_size=32)


def test_what_the_server_has_itself_is_for_everybody_and_stays(store, clock):
    factors = BlockAdapterWeights(None, (LoraFactors("q", torch.ones(2, 3), torch.ones(4, 2)),))
    store.add_public({2: part(1), 3: factors})
    clock.now = 1e6
    store.expire()
    name = pack_adapters([factors], torch.float32)[0][0].digest
    assert store.find("anybody", SPAN, [digest(1), name])[3] is factors
    assert store.memory == 0
    store.clear()
    assert not has(store, "anybody", 1)


class Anything(RuleBasedStateMachine):
    """Whatever peers do, the room is kept, and what is found is what was put."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = AdapterStore(self.clock, LIMITS)
        self.held: list[object] = []

    peers = st.sampled_from("abc")
    seeds = st.integers(0, 6)
    blocks = st.sampled_from([2, 3])

    @rule(peer=peers, seed=seeds, block=blocks)
    def put(self, peer, seed, block):
        try:
            put(self.store, peer, seed, block)
        except (AdapterRefused, CacheFull):
            return
        assert has(self.store, peer, seed, block)

    @rule(peer=peers, seed=seeds, block=blocks)
    def hold(self, peer, seed, block):
        if has(self.store, peer, seed, block):
            names = [digest(seed) if block == here else b"" for here in (2, 3)]
            self.held.append(self.store.find(peer, SPAN, names))

    @rule()
    def let_go(self):
        self.held = self.held[1:]

    @rule(seconds=st.floats(0, 50))
    def wait(self, seconds):
        self.clock.now += seconds
        self.store.expire()

    @invariant()
    def room_is_kept(self):
        assert self.store.memory <= LIMITS.memory
        for peer in "abc":
            assert self.store._memory_of_peer(peer) <= LIMITS.peer_memory
            assert self.store._sizes[peer] == sum(key[0] == peer for key in self.store._kept) * SIZE


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
