"""Clocks that jump while a server or a client runs: the log and the errors name them, and all is well once they do."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from swarm.errors import MissingBlocks
from swarm.server.config import ServerConfig
from swarm.server.lifecycle import Server
from swarm.transport.dht.records import RecordChecker
from swarm.transport.members.dht_lock import DhtLock
from tests import zoo
from tests.members import TestAuthority
from tests.swarms import run_client, run_swarm
from tests.waiting import wait_until

unix_time = time.time


def shift_clock(seconds: Callable[[], float]) -> None:
    """Shift what this process takes for the time."""
    time.time = lambda: unix_time() + seconds()
    RecordChecker.__init__.__defaults__ = DhtLock.__init__.__defaults__ = (time.time,)


def with_clock(file: Path, config: ServerConfig) -> Server:
    """A server whose clock is as far ahead as a file says."""
    shift_clock(lambda: float(file.read_text()))
    return Server(config)


@pytest.mark.parametrize(("seconds", "is_private"), [(900, False), (-300, True)])
def test_a_server_whose_clock_jumps_says_so_and_comes_back(tmp_path: Path, seconds: int, is_private: bool) -> None:
    folder, log, ahead = zoo.make_checkpoint("llama", tmp_path / "model"), tmp_path / "log", tmp_path / "ahead"
    ahead.write_text("0")
    invite = TestAuthority().invite() if is_private else None
    with run_swarm(folder, ["0:3"], invite, update_period=1.0) as swarm:
        swarm.start("3:6", make=partial(with_clock, ahead), log=log, update_period=1.0).wait_ready()
        with run_client(swarm) as model:
            assert len(model.swarm.servers()) == 2
            ahead.write_text(str(seconds))
            wait_until(lambda: len(model.swarm.servers()) == 1)
            wait_until(lambda: "Set this machine's clock" in log.read_text())
            ahead.write_text("0")
            wait_until(lambda: len(model.swarm.servers()) == 2)


def test_a_client_whose_clock_jumps_is_told_so_and_goes_on_with_the_servers_it_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = zoo.make_checkpoint("llama", tmp_path / "model")
    monkeypatch.setattr(time, "time", unix_time)
    for kind in (RecordChecker, DhtLock):
        monkeypatch.setattr(kind.__init__, "__defaults__", (unix_time,))
    ahead = 0.0
    shift_clock(lambda: ahead)
    with run_swarm(folder, ["0:6"]) as swarm, run_client(swarm, wait_for_blocks=0.0) as model:
        ahead = 900.0
        with pytest.raises(MissingBlocks, match="Set this machine's clock"):
            zoo.greedy_texts(model)
        ahead = 0.0
        assert len(model.swarm.servers()) == 1
        caplog.clear()
        ahead = 900.0
        assert len(model.swarm.servers()) == 1
        assert zoo.greedy_texts(model)
        assert "Set this machine's clock" in caplog.text
