"""What a worker remembers, the folder that is one process's own, and the addresses that are told."""

from __future__ import annotations

import stat

import pytest

from swarm.errors import FolderInUse, InvalidOption
from swarm.ring.joining import LockedFolder, told_addresses, with_peer_id
from swarm.ring.worker.memory import FILE, WorkerMemory


def test_what_is_remembered_comes_back(tmp_path):
    memory = WorkerMemory.read(tmp_path).paired_with("QmStarter").listening_at(4321)
    memory.write()
    assert WorkerMemory.read(tmp_path) == memory
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    assert memory.secret.hex() not in repr(memory)


def test_forgetting_makes_a_new_secret_and_keeps_the_port(tmp_path):
    memory = WorkerMemory.read(tmp_path).paired_with("QmStarter").listening_at(4321)
    forgotten = memory.forgotten()
    assert forgotten.starter is None
    assert forgotten.secret != memory.secret
    assert forgotten.port == 4321


def test_a_file_that_cannot_be_used_is_said(tmp_path):
    for data in [b"", b"{}", b"nonsense", b'{"secret": "00"}', b'{"secret": "' + b"0" * 32 + b'", "x": 1}']:
        (tmp_path / FILE).write_bytes(data)
        with pytest.raises(InvalidOption, match="remove it"):
            WorkerMemory.read(tmp_path)


def test_a_folder_is_one_process_at_a_time(tmp_path):
    first = LockedFolder(tmp_path / "new" / "folder", "worker")
    with pytest.raises(FolderInUse, match="another worker of this machine"):
        LockedFolder(first.path, "worker")
    first.close()
    LockedFolder(first.path, "worker").close()


def test_addresses_that_others_can_dial_are_told():
    visible = ["/ip4/127.0.0.1/tcp/1/p2p/Qm", "/ip4/192.168.1.5/tcp/1/p2p/Qm", "/ip4/8.8.8.8/tcp/1/p2p/Qm"]
    assert told_addresses(visible) == ("/ip4/8.8.8.8/tcp/1", "/ip4/192.168.1.5/tcp/1")
    assert told_addresses(visible[:1]) == ("/ip4/127.0.0.1/tcp/1",)
    assert told_addresses(visible, ["/dns4/home/tcp/9"])[0] == "/dns4/home/tcp/9"
    assert len(told_addresses(f"/ip4/10.0.0.{n}/tcp/1" for n in range(50))) == 8
    assert with_peer_id(["/ip4/8.8.8.8/tcp/1"], "Qm") == ("/ip4/8.8.8.8/tcp/1/p2p/Qm",)
