"""What several peers say of a model's parts: believed together, or not at all."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import DigestFileError, UnknownWeights
from swarm.models.checkpoints.known_digests import encode_digest_file
from swarm.shared_weights.trust import TrustedParts, agree, trusted_by_file

truth = {str(block): f"{block:064x}" for block in range(5)}
honest = st.lists(st.sets(st.sampled_from(sorted(truth))), min_size=1, max_size=5)


@given(honest)
def test_peers_that_agree_know_together_what_each_knows(known):
    found = agree("m", [TrustedParts("r", 5, {part: truth[part] for part in parts}) for parts in known])
    assert found == TrustedParts("r", 5, {part: truth[part] for parts in known for part in parts})


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
