"""What several peers say of a model's parts: believed together, or not at all."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import DigestFileError, UnknownWeights
from swarm.models.checkpoints.known_digests import encode_digest_file
from swarm.shared_weights.fetcher import MAX_HOLDERS
from swarm.shared_weights.holder_stream import FIND_TIMEOUT_S
from swarm.shared_weights.manifest import CLIENT, FILES
from swarm.shared_weights.trust import TrustedParts, agree, trusted_at_first_use, trusted_by_file
from tests.shared_weights import bad_holders as bad
from tests.shared_weights.peers import NAME, silent, trusted, with_peers


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


truth = {str(block): f"{block:064x}" for block in range(5)}
honest = st.lists(st.sets(st.sampled_from(sorted(truth))), min_size=1, max_size=5)


@given(honest, st.sampled_from(sorted(truth)), st.integers(0, 100))
def test_one_that_differs_is_enough_to_believe_none(known, part, seed):
    said = [TrustedParts("r", 5, {one: truth[one] for one in {*parts, part}}) for parts in known]
    said.append(TrustedParts("r", 5, {part: "f" * 64}))
    random.Random(seed).shuffle(said)
    with pytest.raises(UnknownWeights, match="disagree"):
        agree("m", said)


@pytest.mark.parametrize("other", [TrustedParts("other", 5, {}), TrustedParts("r", 6, {})])
def test_other_revisions_and_sizes_differ(other):
    with pytest.raises(UnknownWeights, match="disagree"):
        agree("m", [TrustedParts("r", 5, truth), other])


def test_a_file_of_digests(tmp_path):
    path = tmp_path / "digests.json"
    path.write_bytes(encode_digest_file("m", "r", [None] * 5, truth))
    assert trusted_by_file("m", path) == trusted_by_file("m", path, "r") == TrustedParts("r", 5, truth)
    for model, revision in (("other", None), ("m", "other")):
        with pytest.raises(DigestFileError, match="is for m, revision r, not for"):
            trusted_by_file(model, path, revision)
    path.write_bytes(encode_digest_file("m", "r", [None] * 5))
    with pytest.raises(DigestFileError, match="--for-peers"):
        trusted_by_file("m", path)
