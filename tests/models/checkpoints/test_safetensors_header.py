"""Headers of safetensors files that are written here, read by the safetensors library and by this project."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from swarm.models.checkpoints.safetensors_header import (
    DTYPES,
    MAX_HEADER_BYTES,
    encode_header,
    header_length,
    parse_header,
    read_header,
    size_of,
)

names = st.text(min_size=1, max_size=20).filter(lambda name: name != "__metadata__")
tensors = st.lists(
    st.tuples(names, st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
    max_size=6,
    unique_by=lambda one: one[0],
)


@given(tensors)
@settings(max_examples=50)
def test_the_library_reads_what_is_written(described):
    header = encode_header(described)
    data = bytes(number % 251 for number in range(sum(size_of(dtype, shape) for _, dtype, shape in described)))
    position = len(header)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "one.safetensors"
        path.write_bytes(header + data)
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == {name for name, _, _ in described}
            for name, dtype, shape in described:
                found = file.get_tensor(name)
                assert (found.dtype, tuple(found.shape)) == (DTYPES[dtype], shape)
        stored = read_header(path)
    for name, dtype, shape in described:
        assert (stored[name].dtype, stored[name].shape) == (dtype, shape)
        assert stored[name].offset == position
        position += stored[name].size_bytes


@given(st.binary(max_size=200))
def test_garbage_is_refused(data):
    with pytest.raises((ValueError, RecursionError)):
        parse_header(data)


def test_lengths_that_no_header_has():
    for start in [b"", bytes(7), bytes(8), (1).to_bytes(8, "little"), (MAX_HEADER_BYTES + 1).to_bytes(8, "little")]:
        with pytest.raises(ValueError, match=r"too short|whole number"):
            header_length(start)
