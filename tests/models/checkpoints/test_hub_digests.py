"""Digests of a model that is on the hub, from parts of its files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from swarm.errors import CheckpointError
from swarm.models.checkpoints import hub_digests
from swarm.models.checkpoints.block_digest import MAX_FULLY_HASHED_BYTES, PAGE_BYTES, block_digest
from swarm.models.checkpoints.hub_digests import (
    MAX_GAP_BYTES,
    MAX_REQUEST_BYTES,
    HubFiles,
    hub_block_digests,
    near_ranges,
)
from swarm.models.checkpoints.safetensors_header import header_length, parse_header
from tests.models.checkpoints.hub import COMMIT, REPOSITORY, run_hub

LARGE = 40 * MAX_FULLY_HASHED_BYTES


@pytest.fixture(autouse=True)
def _online(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_digests, "RETRY_DELAY_S", 0.01)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """Two blocks in two files, with tensors of all kinds."""
    folder = tmp_path_factory.mktemp("repository")
    generator = torch.Generator().manual_seed(1)
    dtypes = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.bool)
    made = []
    for _ in range(2):
        tensors = {
            "norm.weight": torch.randn(100, generator=generator),
            "scale": torch.tensor(1.5),
            "empty": torch.empty(0, 4),
        }
        for number, dtype in enumerate(dtypes):
            tensors[f"mlp.{number}"] = torch.randint(0, 2, (LARGE // 64, 64), generator=generator).to(dtype)
        made.append(tensors)
    names = {f"layers.{block}.{name}": tensor for block, one in enumerate(made) for name, tensor in one.items()}
    first = {name: tensor for name, tensor in names.items() if name.endswith(("1", "3", "norm.weight"))}
    save_file(first, folder / "a.safetensors", metadata={"format": "pt"})
    save_file({name: tensor for name, tensor in names.items() if name not in first}, folder / "b.safetensors")
    return folder, made


def weight_map(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        found |= dict.fromkeys(parse_header(data[: header_length(data)]), path.name)
    return found


def digests_of(folder: Path, endpoint: str) -> list[str]:
    names: list[dict[str, str]] = [{}, {}]
    for name in weight_map(folder):
        _, block, inside = name.split(".", 2)
        names[int(block)][name] = inside
    return hub_block_digests(HubFiles(REPOSITORY, COMMIT, endpoint), weight_map(folder), names)


def test_they_are_those_of_the_tensors_and_little_is_read(blocks):
    folder, made = blocks
    with run_hub(folder) as hub:
        assert digests_of(folder, hub.endpoint) == [block_digest(tensors) for tensors in made]
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert sum(count for _, count in hub.sent) < size / 10


def test_the_hub_is_asked_once_for_a_file_and_the_store_does_not_get_the_token(blocks, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    folder, made = blocks
    with run_hub(folder) as hub:
        hub.mode = "redirect"
        assert digests_of(folder, hub.endpoint) == [block_digest(tensors) for tensors in made]
    assert sorted(hub.redirected) == ["a.safetensors", "b.safetensors"]
    assert len(hub.sent) > 10
    assert set(hub.store_tokens) == {None}


def test_a_place_in_the_store_that_has_expired_is_asked_for_again(blocks):
    folder, made = blocks
    with run_hub(folder) as hub:
        hub.mode = "expire"
        assert digests_of(folder, hub.endpoint) == [block_digest(tensors) for tensors in made]
    assert len(hub.redirected) > 2


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("whole", "does not let parts of files be read"),
        ("long", "more than was asked for"),
        ("short", "safetensors|shorter"),
        ("broken", "cannot be read"),
    ],
)
def test_a_hub_that_does_not_do_what_it_should(blocks, mode, problem):
    folder, _ = blocks
    with run_hub(folder) as hub:
        hub.mode = mode
        with pytest.raises(CheckpointError, match=problem):
            digests_of(folder, hub.endpoint)


def test_a_file_that_lacks_a_tensor(blocks):
    folder, _ = blocks
    with run_hub(folder) as hub:
        files = HubFiles(REPOSITORY, COMMIT, hub.endpoint)
        with pytest.raises(CheckpointError, match="does not hold the tensor nothing"):
            hub_block_digests(files, {"nothing": "a.safetensors"}, [{"nothing": "nothing"}])


class Bytes:
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, file: str, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


def stored(header: object) -> bytes:
    data = json.dumps(header).encode()
    return len(data).to_bytes(8, "little") + data + bytes(64)


@pytest.mark.parametrize(
    "tensor",
    [
        {},
        [],
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 15]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [10**40], "data_offsets": [0, 16]},
        {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [10**9, 10**9 + 16]},
    ],
)
def test_a_header_that_cannot_be(tensor):
    with pytest.raises(CheckpointError):
        hub_block_digests(Bytes(stored({"w": tensor})), {"w": "a.safetensors"}, [{"w": "w"}])


@given(st.binary(max_size=300))
def test_random_bytes_are_no_file(data):
    with pytest.raises(CheckpointError):
        hub_block_digests(Bytes(data), {"w": "a.safetensors"}, [{"w": "w"}])


@given(st.integers(0, 10**6))
def test_a_file_with_changed_bytes_has_a_digest_or_is_refused(seed):
    choose = random.Random(seed)
    data = bytearray(stored({"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}))
    for _ in range(choose.randint(1, 4)):
        data[choose.randrange(len(data))] = choose.randrange(256)
    try:
        (digest,) = hub_block_digests(Bytes(bytes(data)), {"w": "a.safetensors"}, [{"w": "w"}])
        assert len(digest) == 12
    except CheckpointError:
        pass


@given(st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 10**7), st.integers(1, PAGE_BYTES))))
def test_near_ranges_are_all_there_and_their_requests_are_bounded(ranges):
    groups = near_ranges(ranges)
    assert sorted(one for group in groups for one in group) == sorted(ranges)
    for group in groups:
        assert len({file for file, _, _ in group}) == 1
        first, end = group[0][1], max(offset + length for _, offset, length in group)
        assert end - first <= MAX_REQUEST_BYTES
        assert end - first <= sum(length for _, _, length in group) + MAX_GAP_BYTES * len(group)
