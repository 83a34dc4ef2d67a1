from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import ProtocolViolation
from swarm.models.checkpoints.checkpoint import MAX_TENSOR_NAME_CHARACTERS
from swarm.models.checkpoints.safetensors_header import DTYPES, size_of
from swarm.shared_weights.manifest import (
    CHUNK_BYTES,
    CLIENT,
    FILES,
    MAX_ITEM_BYTES,
    MAX_ITEMS,
    MAX_MANIFEST_BYTES,
    Item,
    ModelManifest,
    PartManifest,
)

DIGEST = bytes(32)
TENSOR = ["layer.weight", "F32", [2, 3], 24, DIGEST]
FILE = ["config.json", "", [], 7, DIGEST]

names = st.text(min_size=1, max_size=30)
sha256 = st.binary(min_size=32, max_size=32)
tensors = st.builds(
    lambda name, dtype, shape, digest: Item(name, dtype, tuple(shape), size_of(dtype, shape), digest),
    names,
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 64), max_size=4),
    sha256,
)
files = st.builds(lambda name, size, digest: Item(name, "", (), size, digest), names, st.integers(0, 1 << 30), sha256)


def listed(items: st.SearchStrategy[Item]) -> st.SearchStrategy[tuple[Item, ...]]:
    return st.lists(items, max_size=6, unique_by=lambda item: item.name).map(tuple)


def decoded_or_refused(part: str, data: bytes) -> None:
    """Nothing but a manifest or a `ProtocolViolation` comes out, whatever goes in."""
    with contextlib.suppress(ProtocolViolation):
        assert isinstance(PartManifest.decode(part, data), PartManifest)


def changed(item: list[object], place: int, value: object) -> bytes:
    return msgspec.msgpack.encode([[*item[:place], value, *item[place + 1 :]]])


@given(st.sampled_from([CLIENT, "0", "17"]), listed(tensors))
def test_tensors_arrive_as_they_were(part, items):
    manifest = PartManifest(items)
    found = PartManifest.decode(part, manifest.encoded)
    assert found == manifest
    assert (found.encoded, found.digest) == (manifest.encoded, manifest.digest)
    assert found.size_bytes == sum(item.size for item in items)


@given(listed(tensors), st.data())
def test_another_item_makes_another_digest(items, data):
    more = data.draw(tensors.filter(lambda one: one.name not in {item.name for item in items}))
    assert PartManifest(items).digest != PartManifest((*items, more)).digest


@given(st.sampled_from([FILES, CLIENT, "0"]), listed(tensors | files), st.data())
def test_a_damaged_manifest_never_raises_anything_else(part, items, data):
    encoded = bytearray(PartManifest(items).encoded)
    encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    decoded_or_refused(part, bytes(encoded))
    decoded_or_refused(part, bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=6),
    max_leaves=12,
)


@given(st.sampled_from([FILES, CLIENT, "0"]), values)
def test_any_values_never_raise_anything_else(part, value):
    decoded_or_refused(part, msgspec.msgpack.encode(value))


def test_what_is_no_manifest():
    for part, data, why in [
        ("0", changed(TENSOR, 3, 25), "does not follow"),
        ("0", changed(TENSOR, 3, 0), "does not follow"),
        (CLIENT, changed(TENSOR, 2, [1 << 48] * 16), "does not follow"),
        ("0", changed(TENSOR, 1, "F31"), "unknown dtype"),
        ("0", msgspec.msgpack.encode([FILE]), "unknown dtype"),
        (FILES, msgspec.msgpack.encode([TENSOR]), "is no file"),
        (FILES, changed(FILE, 2, [7]), "is no file"),
        ("0", msgspec.msgpack.encode([TENSOR, TENSOR]), "occurs twice"),
        (FILES, msgspec.msgpack.encode([FILE, FILE]), "occurs twice"),
        ("0", changed(TENSOR, 0, ""), "length"),
        ("0", changed(TENSOR, 0, "n" * (MAX_TENSOR_NAME_CHARACTERS + 1)), "length"),
        ("0", changed(TENSOR, 2, [-2, -3]), ">= 0"),
        ("0", changed(TENSOR, 2, [1] * 17), "length"),
        (FILES, changed(FILE, 3, -1), ">= 0"),
        (FILES, changed(FILE, 3, MAX_ITEM_BYTES + 1), "<="),
        (FILES, changed(FILE, 4, bytes(31)), "length"),
        (FILES, changed(FILE, 4, bytes(33)), "length"),
        (FILES, msgspec.msgpack.encode([[*FILE, 1]]), "length"),
        (FILES, msgspec.msgpack.encode([FILE[:-1]]), "length"),
        (FILES, msgspec.msgpack.encode([FILE]) + b"\0", "trailing"),
        (FILES, msgspec.msgpack.encode([FILE] * (MAX_ITEMS + 1)), "length"),
        (FILES, b"\xdd\xff\xff\xff\xff", "length"),
        (FILES, bytes(MAX_MANIFEST_BYTES + 1), "too large"),
    ]:
        with pytest.raises(ProtocolViolation, match=why):
            PartManifest.decode(part, data)


@given(st.integers(0, 5 * CHUNK_BYTES))
def test_chunks_cover_an_item_once(size):
    item = Item("a", "", (), size, DIGEST)
    ranges = [item.chunk_range(chunk) for chunk in range(item.chunks)]
    assert sum(length for _, length in ranges) == size
    assert [offset for offset, _ in ranges] == [chunk * CHUNK_BYTES for chunk in range(item.chunks)]
    assert all(0 < length <= CHUNK_BYTES for _, length in ranges)


def test_the_manifests_of_a_model():
    one = PartManifest((Item("a", "", (), 7, DIGEST),))
    found = ModelManifest("m", "r", 1, {FILES: one, "0": PartManifest(())})
    assert found.digests == {FILES: one.digest, "0": PartManifest(()).digest}
    assert found.size_bytes([FILES, "0"]) == 7
