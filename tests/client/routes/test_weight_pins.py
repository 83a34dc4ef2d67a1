"""What servers are believed, and when."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.client.routes import weight_pins as module
from swarm.client.routes.weight_pins import WeightPins, first_use, make_pins
from swarm.data_structures import ServerInfo, ServerState, WeightDigests
from swarm.errors import DigestFileError, UnknownWeights
from swarm.models.checkpoints.digest_file import read_digest_file
from tests.infos import server_info

REVISION = "main"
RIGHT, WRONG = "0123456789ab", "ffffffffffff"
CHECKPOINT: Any = SimpleNamespace(name="m", revision=REVISION, blocks=4, source="/nowhere")
NOTHING = WeightDigests({}, "nothing")


def server(start: int, end: int, digest: str = RIGHT, peer: str = "a", **fields: Any) -> ServerInfo:
    return server_info(start, end, peer, digests=(digest,) * (end - start), **fields)


@pytest.fixture
def unknown(monkeypatch, tmp_path) -> Path:
    """No source says which weights are right; pins are kept in the folder that this returns."""

    def raise_unknown(checkpoint: Any, file: Any) -> WeightDigests:
        raise UnknownWeights("nothing says which weights")

    monkeypatch.setattr(module, "known_digests", raise_unknown)
    monkeypatch.setattr(module, "kept_path", lambda kind, checkpoint: tmp_path / f"{kind}.json")
    return tmp_path


def test_what_all_agree_about_is_pinned():
    found = first_use(NOTHING, [server(0, 2), server(1, 3, peer="b")], REVISION)
    assert found.by_block == {0: RIGHT, 1: RIGHT, 2: RIGHT}


def test_where_servers_disagree_nothing_is_pinned_whatever_the_majority():
    crowd = [server(1, 3, WRONG, f"other{number}") for number in range(20)]
    assert first_use(NOTHING, [server(0, 2), *crowd], REVISION).by_block == {0: RIGHT, 2: WRONG}


def test_only_online_servers_of_the_revision_count():
    others = [
        server(0, 1, WRONG, "b", state=ServerState.OFFLINE),
        server(0, 1, WRONG, "c", revision="other"),
    ]
    assert first_use(NOTHING, [server(0, 1), *others], REVISION).by_block == {0: RIGHT}


@given(
    st.dictionaries(st.integers(0, 3), st.sampled_from([RIGHT, WRONG])),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2), st.sampled_from([RIGHT, WRONG])), max_size=6),
)
def test_what_is_pinned_never_changes(pinned, specs):
    servers = [server(start, start + length, digest, f"p{n}") for n, (start, length, digest) in enumerate(specs)]
    found = first_use(WeightDigests(pinned, "before"), servers, REVISION).by_block
    assert {block: found[block] for block in pinned} == pinned


def test_first_use_is_said_aloud_and_kept(unknown, caplog, monkeypatch):
    with pytest.raises(UnknownWeights):
        make_pins(CHECKPOINT, None, trust_on_first_use=False)
    pins = make_pins(CHECKPOINT, None, trust_on_first_use=True)
    monkeypatch.setattr(logging.getLogger("swarm"), "propagate", True)
    with caplog.at_level(logging.WARNING, "swarm"):
        assert pins.learn([server(0, 2)]).by_block == {0: RIGHT, 1: RIGHT}
        assert pins.learn([server(0, 2, WRONG)]).by_block == {0: RIGHT, 1: RIGHT}
    (record,) = caplog.records
    assert "First use: the weights of blocks 0:2" in record.message
    again = make_pins(CHECKPOINT, None, trust_on_first_use=True)
    assert again.learn([server(0, 4, WRONG)]).by_block == {0: RIGHT, 1: RIGHT, 2: WRONG, 3: WRONG}
    assert "remove this file only if you know" in again.known.origin
    assert read_digest_file(unknown / "first-use.json").digests == (RIGHT, RIGHT, WRONG, WRONG)


@pytest.mark.usefixtures("unknown")
def test_pins_of_another_model_are_not_used():
    make_pins(CHECKPOINT, None, trust_on_first_use=True).learn([server(0, 2)])
    other: Any = SimpleNamespace(**{**vars(CHECKPOINT), "revision": "another"})
    with pytest.raises(DigestFileError, match="revision another"):
        make_pins(other, None, trust_on_first_use=True)


def test_a_place_that_cannot_be_written_is_no_reason_to_fail():
    pins = WeightPins(NOTHING, CHECKPOINT, Path("/proc/nothing/pins.json"))
    assert pins.learn([server(0, 1)]).by_block == {0: RIGHT}


def test_known_digests_are_all_that_counts():
    pins = WeightPins(WeightDigests({0: RIGHT}, "those in FILE"))
    assert pins.learn([replace(server(0, 4, WRONG))]).by_block == {0: RIGHT}
