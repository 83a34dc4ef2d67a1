"""Processes that receive or share weights are killed at many moments: the transfer goes on where it was."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.shared_weights import fetcher
from swarm.shared_weights.checkpoint_parts import CheckpointParts
from swarm.shared_weights.fetcher import WINDOW
from swarm.shared_weights.manifest import CHUNK_BYTES, CLIENT, FILES, all_parts
from tests.shared_weights.peers import BLOCKS, NAME, make_checkpoint
from tests.shared_weights.processes import Shared, receive, receive_until, send
from tests.swarms import FORKS

PARTS = all_parts(BLOCKS)
STOP_TIMEOUT = 60.0

RECEIVER_DIES_IN = (
    ("replace", 1),  # the file that says what the folder has
    ("pwrite", 1),
    ("fsync", 2),
    ("pwrite", 9),
    ("replace", 3),
    ("pwrite", 6),
    ("fsync", 1),
    ("pwrite", 7),
    ("pwrite", 5),
    ("pwrite", 3),
)
"""In the middle of which call, one receiver after the other. Odd calls are done before it dies, others are not; a write
is done by half."""

SENDER_DIES_AFTER = tuple(range(1, 60, 6))
"""Chunks that were received from all senders."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Tensors of up to three chunks; 45 MB."""
    return make_checkpoint(tmp_path_factory.mktemp("large") / "model", hidden=600)


@pytest.fixture
def shared(source, tmp_path) -> Iterator[Shared]:
    manifests = CheckpointParts(source, tmp_path / "kept").manifests()
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="sw-") as folder:  # short: names of sockets are
        yield Shared(
            source=str(source.source),
            name=NAME,
            revision=source.revision,
            blocks=BLOCKS,
            digests=manifests.digests,
            socket=f"{folder}/socket",
            root=tmp_path / "stores",
            kept=tmp_path / "kept",
        )


@pytest.fixture
def processes() -> Iterator[list[BaseProcess]]:
    """Those that a test starts; none survives it."""
    started: list[BaseProcess] = []
    yield started
    for process in started:
        process.kill()
        process.join()


def start(processes: list[BaseProcess], work, *arguments) -> BaseProcess:
    process = FORKS.Process(target=work, args=arguments, daemon=True)
    process.start()
    processes.append(process)
    return process


def assert_right(source, shared: Shared, all_of_them: bool) -> None:
    """What looks whole is right, and nothing else can be opened."""
    store = shared.open_store()
    assert not all_of_them or store.held == set(PARTS)
    tensors = load_file(f"{source.source}/model.safetensors")
    for part in store.held - {FILES}:
        found = load_file(store.path(part))
        names = {name for name in tensors if (str(place[0]) if (place := source.locate(name)) else CLIENT) == part}
        assert found.keys() == names
        assert all(found[name].equal(tensors[name]) for name in names), part
    if FILES in store.held:
        received = open_checkpoint(store.folder)
        assert without_path(received) == without_path(source)
        blocks = [block for block in range(BLOCKS) if received.block_digests(block, block + 1) is not None]
        assert {str(block) for block in blocks} == store.held - {FILES, CLIENT}
    assert sorted(path.name for path in Path(store.folder).glob("*.safetensors")) == sorted(
        store.path(part).name for part in store.held - {FILES}
    )


def without_path(checkpoint) -> dict[str, object]:
    """Its config, without where it is."""
    return {**checkpoint.config.to_dict(), "_name_or_path": ""}


def assert_little_was_sent_twice(source, sent: int, deaths: int) -> None:
    """At most what was under way, each time."""
    size = CheckpointParts(source).size_bytes(PARTS)
    assert size <= sent <= size + deaths * WINDOW * CHUNK_BYTES


def test_a_receiver_is_killed_again_and_again(source, shared, processes):
    sent = FORKS.Value("q", 0, lock=False)  # a process that is killed would keep a lock
    sender = start(processes, send, shared, sent)
    for function, calls in RECEIVER_DIES_IN:
        receiver = start(processes, receive_until, shared, PARTS, function, calls)
        receiver.join(STOP_TIMEOUT)
        assert receiver.exitcode == -signal.SIGKILL, (function, calls)
        assert_right(source, shared, all_of_them=False)
    asyncio.run(asyncio.wait_for(receive(shared, PARTS), STOP_TIMEOUT))
    assert sender.is_alive()
    assert_right(source, shared, all_of_them=True)
    assert_little_was_sent_twice(source, sent.value, len(RECEIVER_DIES_IN))


def test_a_sender_is_killed_again_and_again(source, shared, processes, monkeypatch):
    monkeypatch.setattr(fetcher, "RETRY_S", 0.05)
    sent = FORKS.Value("q", 0, lock=False)
    senders = [start(processes, send, shared, sent)]
    moments = list(SENDER_DIES_AFTER)
    done = 0

    def note(progress: object) -> None:
        nonlocal done
        if progress.done_bytes <= done:
            return
        done = progress.done_bytes
        note.chunks += 1
        if moments and note.chunks >= moments[0]:
            moments.pop(0)
            senders[-1].kill()
            senders.append(start(processes, send, shared, sent))

    note.chunks = 0
    asyncio.run(asyncio.wait_for(receive(shared, PARTS, note), STOP_TIMEOUT))
    assert len(senders) == 1 + len(SENDER_DIES_AFTER)
    assert_right(source, shared, all_of_them=True)
    assert_little_was_sent_twice(source, sent.value, len(SENDER_DIES_AFTER))
