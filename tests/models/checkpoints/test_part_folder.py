"""What a folder with parts of a model says of itself: foreign input, like every file of a checkpoint."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.models.checkpoints import part_folder
from swarm.models.checkpoints.config_limits import MAX_BLOCKS
from swarm.models.checkpoints.part_folder import MAX_NAME_CHARACTERS, PARTS_FILE, PartFolder, read_part_folder

RIGHT = {
    "format": 1,
    "model": "org/model",
    "revision": "main",
    "blocks": 3,
    "tensors": {"block-00000.safetensors": ["a", "b"], "client.safetensors": ["c"]},
}

names = st.text(max_size=30)
folders = st.builds(
    PartFolder,
    names,
    names,
    st.integers(1, MAX_BLOCKS),
    st.dictionaries(names, st.from_regex(r"\A[a-z0-9-]{1,64}\.safetensors\Z"), max_size=5),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parts")


def read(folder, data: bytes) -> PartFolder | None:
    (folder / PARTS_FILE).write_bytes(data)
    return read_part_folder(folder)


def spoiled(**changes: object) -> bytes:
    return json.dumps({**RIGHT, **changes}).encode()


@given(described=folders)
def test_what_was_written_is_read(folder, described):
    assert read(folder, described.encode()) == described


@given(changes=st.dictionaries(st.sampled_from([*RIGHT, "more"]), values, min_size=1, max_size=3))
@settings(max_examples=200)
def test_any_values_never_raise_anything_else(folder, changes):
    with contextlib.suppress(ValueError):
        assert isinstance(read(folder, spoiled(**changes)), PartFolder)


def test_no_file_lies_elsewhere(folder):
    for file in [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..safetensors",
        ".safetensors",
        ".hidden.safetensors",
        "a\\b.safetensors",
        "A.safetensors",
        "a.safetensors\n",
        "a\0.safetensors",
        "a.bin",
        "a" * 65 + ".safetensors",
        "",
        "..",
        "swarm-parts.json",
    ]:
        with pytest.raises(ValueError, match="not of the form"):
            read(folder, spoiled(tensors={file: ["a"]}))


def test_what_breaks_the_schema(folder):
    for changes in [
        {"format": 2},
        {"format": True},
        {"blocks": 0},
        {"blocks": MAX_BLOCKS + 1},
        {"blocks": 3.0},
        {"model": "m" * (MAX_NAME_CHARACTERS + 1)},
        {"model": None},
        {"model": "\ud800"},
        {"revision": 1},
        {"tensors": []},
        {"tensors": {"client.safetensors": "a"}},
        {"tensors": {"client.safetensors": [1]}},
        {"tensors": {"client.safetensors": ["a" * (MAX_NAME_CHARACTERS + 1)]}},
        {"more": 1},
    ]:
        with pytest.raises(ValueError, match=r"expected|unknown field|surrogates"):
            read(folder, spoiled(**changes))


def test_a_file_that_is_too_large(folder, monkeypatch):
    monkeypatch.setattr(part_folder, "MAX_FILE_BYTES", 100)
    with pytest.raises(ValueError, match="larger than 100 bytes"):
        read(folder, spoiled())
