"""Manifests: what is read back is what was written, and nothing that a file may say goes further than an error."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import PackedFileError
from swarm.models.flash.block_plan import BlockPlan, RecordKind
from swarm.models.flash.files import manifest as manifests
from swarm.models.flash.files.block_files import PackedModel
from swarm.models.flash.files.manifest import (
    FileContent,
    Manifest,
    PartDigests,
    encode_manifest,
    number_of_parts,
    read_manifest,
    verify_parts,
)

DIGEST = "0" * 64
PLAN = BlockPlan(
    RecordKind.NEURONS,
    {"up": "mlp.up", "down": "mlp.down"},
    {"mlp.up.weight": 0, "mlp.down.weight": 1},
    ("mlp.up.bias",),
)
LAYOUT = PLAN.layout({"mlp.up.weight": (48, 32), "mlp.down.weight": (32, 48)}, torch.bfloat16)


@pytest.fixture
def model(tmp_path) -> PackedModel:
    return PackedModel(tmp_path, "org/model", "0123abcd", torch.bfloat16)


def content_of(size: int) -> FileContent:
    return FileContent(size, (DIGEST,) * number_of_parts(size))


@pytest.fixture
def manifest(model) -> Manifest:
    return Manifest.of(model, 3, "0123456789ab", PLAN, LAYOUT, (content_of(LAYOUT.file_bytes), content_of(70_000_000)))


def read(path, model) -> Manifest:
    return read_manifest(path, model, 3, PLAN, LAYOUT)


def content_in(sealed: bytes) -> dict[str, Any]:
    return json.loads(sealed)["content"]


def written(path, content: object) -> None:
    """Write any content with the right digest."""
    data = json.dumps(content).encode()
    sealed = b'{"sha256":"' + hashlib.sha256(data).hexdigest().encode() + b'","content":' + data + b"}"
    path.write_bytes(sealed)


def test_what_is_read_is_what_was_written(manifest, model, tmp_path):
    (tmp_path / "file").write_bytes(encode_manifest(manifest))
    assert read(tmp_path / "file", model) == manifest


def test_a_changed_bit_anywhere_is_found(manifest, model, tmp_path):
    data = encode_manifest(manifest)
    for byte in range(0, len(data), 7):
        changed = bytearray(data)
        changed[byte] ^= 1 << byte % 8
        (tmp_path / "file").write_bytes(changed)
        with pytest.raises(PackedFileError, match="is not a manifest"):
            read(tmp_path / "file", model)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 100_000, b"null", b"{}", b'{"sha256":"","content":1}'])
def test_what_is_no_manifest(model, tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(PackedFileError, match="is not a manifest"):
        read(tmp_path / "file", model)


@pytest.mark.parametrize("part", ["block", "dtype", "model", "revision"])
def test_the_files_of_another_block_or_model(manifest, model, tmp_path, part):
    other = dataclasses.replace(manifest, **{part: 4 if part == "block" else "other"})
    (tmp_path / "file").write_bytes(encode_manifest(other))
    with pytest.raises(PackedFileError, match="the files are those of block"):
        read(tmp_path / "file", model)


def test_records_of_another_kind_or_layout(manifest, model, tmp_path):
    experts = dataclasses.replace(PLAN, kind=RecordKind.EXPERTS)
    (tmp_path / "file").write_bytes(encode_manifest(dataclasses.replace(manifest, plan=experts)))
    with pytest.raises(PackedFileError, match="of another kind"):
        read(tmp_path / "file", model)
    shorter = dataclasses.replace(LAYOUT, count=LAYOUT.count - 1)
    (tmp_path / "file").write_bytes(encode_manifest(dataclasses.replace(manifest, layout=shorter)))
    with pytest.raises(PackedFileError, match="prepared in another way"):
        read(tmp_path / "file", model)


ABSURD = [-1, 0, 1, 2**31, 2**50, 2**63, 10**30, 1.5, None, "x", [], {}]


def places(content: object, path: tuple = ()) -> list[tuple]:
    """The path of every value in nested lists and dictionaries."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))][not path :]


def replaced(content: object, path: tuple, value: object) -> object:
    if not path:
        return value
    copied = dict(content) if isinstance(content, dict) else list(content)
    copied[path[0]] = replaced(copied[path[0]], path[1:], value)
    return copied


@settings(max_examples=400)
@given(data=st.data())
def test_absurd_values_are_refused_before_anything_is_allocated(tmp_path_factory, data):
    """With a digest that fits: whatever is accepted says of the records what was written."""
    model = PackedModel(tmp_path_factory.getbasetemp(), "org/model", "0123abcd", torch.bfloat16)
    manifest = Manifest.of(model, 3, "0123456789ab", PLAN, LAYOUT, (content_of(LAYOUT.file_bytes), content_of(7)))
    content = content_in(encode_manifest(manifest))
    place = data.draw(st.sampled_from(places(content)))
    value = data.draw(st.sampled_from(ABSURD))
    path = model.root / "absurd"
    written(path, replaced(content, place, value))
    try:
        found = read(path, model)
    except PackedFileError:
        return
    assert found == dataclasses.replace(manifest, digest=found.digest, records=found.records, resident=found.resident)
    assert found.records.size == LAYOUT.file_bytes


DATA = bytes(range(256)) * 5


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(manifests, "PART_BYTES", 300)
    monkeypatch.setattr(manifests, "READ_BYTES", 77)


def digests_of(data: bytes) -> tuple[str, ...]:
    digests = PartDigests()
    digests.update(memoryview(data))
    return digests.finish()


@pytest.fixture
def path(tmp_path, small_parts):
    (tmp_path / "block").write_bytes(DATA)
    return tmp_path / "block"


@pytest.mark.parametrize(("byte", "place"), [(0, "at its beginning"), (299, "at its beginning"), (1279, "from 1.2 KB")])
def test_a_changed_bit_is_found_and_its_part_is_named(path, byte, place):
    changed = bytearray(DATA)
    changed[byte] ^= 1
    path.write_bytes(changed)
    with pytest.raises(PackedFileError, match=place):
        verify_parts(path, digests_of(DATA))
