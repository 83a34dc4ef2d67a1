"""Who finds which prefix, and what is kept where memory is short."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.chain.prefix import Prefix
from swarm.generation.prefix_store import MIN_PREFIX_TOKENS, PrefixStore

SIZE = 1000
"""Bytes of each prefix, but where a test says otherwise."""

BASE = list(range(100))


class _Source(Prefix):
    @property
    def bytes(self) -> int:
        return SIZE


def prefix(*tokens: int) -> Prefix:
    nowhere: Any = None
    return _Source(torch.tensor(tokens), nowhere)


def found(store: PrefixStore, owner: str, tokens: list[int]) -> list[int] | None:
    prefix = store.find(owner, tokens)
    return prefix.tokens.tolist() if prefix is not None else None


def test_the_longest_common_beginning_is_found_by_its_owner_alone() -> None:
    store = PrefixStore(10 * SIZE)
    store.add("a", prefix(*BASE[:60]))
    store.add("a", prefix(*BASE[:50], 7, 7, 7))
    assert found(store, "a", [*BASE[:55], 9, 9]) == BASE[:55]
    assert found(store, "a", [*BASE[:50], 7, 7, 8, 8]) == [*BASE[:50], 7, 7]
    assert found(store, "a", BASE[:60]) == BASE[:59]  # the last one gives the scores of the next
    assert found(store, "a", [*BASE[: MIN_PREFIX_TOKENS - 1], 7]) is None
    assert found(store, "b", BASE) is None


def test_what_is_contained_in_a_longer_one_is_kept_once() -> None:
    store = PrefixStore(10 * SIZE)
    store.add("a", prefix(*BASE[:40]))
    store.add("b", prefix(*BASE[:40]))
    store.add("a", prefix(*BASE))
    assert (len(store), store.bytes) == (2, 2 * SIZE)
    assert found(store, "a", [*BASE[:35], 1, 1]) == BASE[:35]


def test_nothing_is_kept_without_memory() -> None:
    store = PrefixStore(0)
    store.add("a", prefix(*BASE))
    assert len(store) == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=30))
def test_the_owner_of_most_loses_its_least_recently_used_prefix(uses: list[tuple[str, bool]]) -> None:
    """A model of it: for each owner a list, in the order of use."""
    store, expected = PrefixStore(4 * SIZE), {owner: [] for owner in "abc"}  # type: ignore[var-annotated]
    for number, (owner, is_new) in enumerate(uses):
        mine = expected[owner]
        if is_new or not mine:
            mine.append(number)
            store.add(owner, prefix(number, *BASE))
            if sum(map(len, expected.values())) > 4:
                most = max(map(len, expected.values()))
                losers = [one for one in expected.values() if len(one) == most]
                gone = [one for one in losers if store.find(_owner(expected, one), [one[0], *BASE, 0]) is None]
                assert len(gone) == 1
                del gone[0][0]
                for one in losers:
                    if one is not gone[0]:
                        one.append(one.pop(0))  # it was looked up
        else:
            mine.append(mine.pop(0))
            assert found(store, owner, [mine[-1], *BASE, 0]) == [mine[-1], *BASE]
    assert len(store) == sum(map(len, expected.values())) <= 4


def _owner(expected: dict[str, list[int]], mine: list[int]) -> str:
    return next(owner for owner, one in expected.items() if one is mine)
