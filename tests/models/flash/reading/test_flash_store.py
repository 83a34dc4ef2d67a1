"""A store over a real file, read in each way, against the bytes of the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm.errors import DriveFailed, InvalidOption, PackedFileError
from swarm.models.flash.reading.flash_store import FlashStore
from swarm.models.flash.reading.record_reader import FlashIo
from swarm.models.flash.records.record_buffer import RecordBuffer
from swarm.models.flash.records.record_layout import RecordLayout
from swarm.models.flash.records.weight_store import MemoryStore

COUNT, WIDTH = 96, 1500


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"up": torch.randn(COUNT, WIDTH), "down": torch.randn(WIDTH, COUNT)}


@pytest.fixture(scope="module")
def layout(tensors: dict[str, torch.Tensor]) -> RecordLayout:
    return RecordLayout.of({name: tuple(t.shape) for name, t in tensors.items()}, {"up": 0, "down": 1}, torch.float32)


@pytest.fixture(scope="module")
def packed(tensors: dict[str, torch.Tensor], layout: RecordLayout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed file whose records begin at its second page."""
    buffer = RecordBuffer(layout, COUNT)
    MemoryStore(layout, tensors).read(np.arange(COUNT), buffer, np.arange(COUNT)).wait()
    path = tmp_path_factory.mktemp("packed") / "block-3.records"
    path.write_bytes(bytes(4096) + buffer.data.numpy().tobytes())
    return path


@pytest.fixture(scope="module", params=list(FlashIo))
def store(request: pytest.FixtureRequest, packed: Path, layout: RecordLayout) -> Iterator[FlashStore]:
    try:
        opened = FlashStore.open(packed, layout, request.param, offset=4096)
    except InvalidOption:
        pytest.skip("the file system of the temporary folder has no direct reads")
    yield opened
    opened.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.integers(0, COUNT - 1), max_size=COUNT), st.randoms())
def test_records_come_to_their_slots(
    store: FlashStore, tensors: dict[str, torch.Tensor], records: list[int], random: np.random.Generator
) -> None:
    slots = list(range(COUNT))
    random.shuffle(slots)
    if len(records) % 2:  # as often in runs as scattered
        records, slots = sorted(set(records)), list(range(COUNT))
    slots = slots[: len(records)]
    buffer = RecordBuffer(store.layout, COUNT)
    store.read(np.array(records, dtype=np.int64), buffer, np.array(slots, dtype=np.int64)).wait()
    assert torch.equal(buffer.field("up")[slots], tensors["up"][records])
    assert torch.equal(buffer.field("down")[slots], tensors["down"].T[records])


def test_two_reads_on_their_way_at_once(store: FlashStore, tensors: dict[str, torch.Tensor]) -> None:
    first, second = RecordBuffer(store.layout, COUNT), RecordBuffer(store.layout, 8)
    everything = store.read(np.arange(COUNT), first, np.arange(COUNT)[::-1].copy())
    some = store.read(np.arange(8, 16), second, np.arange(8))
    some.wait()
    assert torch.equal(second.field("up"), tensors["up"][8:16])
    everything.wait()
    everything.wait()
    assert torch.equal(first.field("up").flip(0), tensors["up"])


def test_what_is_counted(packed: Path, layout: RecordLayout) -> None:
    store = FlashStore.open(packed, layout, FlashIo.CACHED, offset=4096)
    pending = store.read(np.array([1, 2, 3, 50]), RecordBuffer(layout, 4), np.arange(4))
    assert store.counters.wait_seconds == 0
    pending.wait()
    assert (store.counters.records, store.counters.reads) == (4, 2)
    assert store.counters.bytes == 4 * layout.stride
    assert store.counters.wait_seconds > 0
    store.close()


@pytest.mark.parametrize(
    ("records", "slots"),
    [([COUNT], [0]), ([-1], [0]), ([0], [4]), ([0], [-1]), ([0, 1], [0])],
)
def test_nothing_is_read_outside_the_file_or_the_buffer(
    store: FlashStore, records: list[int], slots: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"records|slots"):
        store.read(np.array(records), RecordBuffer(store.layout, 4), np.array(slots))


def test_another_layout_is_refused(store: FlashStore) -> None:
    other = RecordBuffer(RecordLayout.of({"up": (4, 10)}, {"up": 0}, torch.float32), 4)
    with pytest.raises(ValueError, match="records of"):
        store.read(np.array([0]), other, np.array([0]))


@pytest.mark.parametrize("io", list(FlashIo))
def test_a_file_that_is_too_short_is_refused(io: FlashIo, packed: Path, layout: RecordLayout, tmp_path: Path) -> None:
    short = tmp_path / "short.records"
    short.write_bytes(packed.read_bytes()[:-4096])
    with pytest.raises((PackedFileError, InvalidOption), match=r"prepare|direct reads"):
        FlashStore.open(short, layout, io, offset=4096)


@pytest.mark.parametrize("io", list(FlashIo))
def test_a_file_that_is_truncated_while_it_is_open(
    io: FlashIo, packed: Path, layout: RecordLayout, tmp_path: Path
) -> None:
    path = tmp_path / "block-3.records"
    path.write_bytes(packed.read_bytes())
    try:
        store = FlashStore.open(path, layout, io, offset=4096)
    except InvalidOption:
        pytest.skip("the file system of the temporary folder has no direct reads")
    buffer = RecordBuffer(layout, COUNT)
    with path.open("r+b") as file:
        file.truncate(4096 + 10 * layout.stride)
    with pytest.raises(DriveFailed, match=r"block-3\.records could not be read: the file ends before.*prepare"):
        store.read(np.arange(5, 20), buffer, np.arange(5, 20)).wait()
    store.read(np.arange(10), buffer, np.arange(10)).wait()  # what is there can still be read
    store.close()


def test_a_missing_file_is_refused(layout: RecordLayout, tmp_path: Path) -> None:
    for io in FlashIo:
        with pytest.raises(PackedFileError, match="No such file"):
            FlashStore.open(tmp_path / "missing", layout, io)
