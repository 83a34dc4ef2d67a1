"""Files are compared with the digests of their parts, by many threads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import PackedFileError
from swarm.models.flash.files import content_digests
from swarm.models.flash.files.content_digests import PartDigests, number_of_parts, verify_parts

DATA = bytes(range(256)) * 5


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    monkeypatch.setattr(content_digests, "PART_BYTES", 300)
    monkeypatch.setattr(content_digests, "READ_BYTES", 77)


def digests_of(data: bytes) -> tuple[str, ...]:
    digests = PartDigests()
    digests.update(memoryview(data))
    return digests.finish()


@pytest.fixture
def path(tmp_path):
    (tmp_path / "block").write_bytes(DATA)
    return tmp_path / "block"


def test_every_byte_is_compared_and_counted(path):
    counted = []
    verify_parts(path, digests_of(DATA), counted.append)
    assert sum(counted) == len(DATA)
    assert len(counted) == number_of_parts(len(DATA)) == 5


@pytest.mark.parametrize(("byte", "place"), [(0, "at its beginning"), (299, "at its beginning"), (1279, "from 1.2 KB")])
def test_a_changed_bit_is_found_and_its_part_is_named(path, byte, place):
    changed = bytearray(DATA)
    changed[byte] ^= 1
    path.write_bytes(changed)
    with pytest.raises(PackedFileError, match=place):
        verify_parts(path, digests_of(DATA))


def test_a_shorter_file_is_found(path):
    path.write_bytes(DATA[:-1])
    with pytest.raises(PackedFileError):
        verify_parts(path, digests_of(DATA))


def test_a_missing_file_is_a_system_error(path):
    path.unlink()
    with pytest.raises(FileNotFoundError):
        verify_parts(path, digests_of(DATA))


@given(st.lists(st.binary(max_size=700), max_size=6))
def test_digests_do_not_depend_on_how_data_arrives(pieces):
    digests = PartDigests()
    for piece in pieces:
        digests.update(memoryview(piece))
    assert digests.finish() == digests_of(b"".join(pieces))
