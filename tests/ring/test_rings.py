"""Rings of real processes on this machine: only the starter can read the model, and tokens equal the local model's."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import swarm
from swarm.cli.local_swarm import LOOPBACK, PeerProcess
from swarm.errors import NotEnoughMemory, PairedWithAnother, PartitionError
from swarm.ring.starter.handle import unpair
from tests.ring.processes import WorkerProcess, know_speed
from tests.waiting import wait_until
from tests.zoo import VOCABULARY, make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning", "ignore:loop is closed:ResourceWarning")

NEW_TOKENS = 12
PROMPTS = torch.randint(1, VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(3))


class Machines:
    """A starter's folder, and two workers.

    Attributes:
        model: the folder of the model.
        expected: what the local model writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = make_checkpoint("llama", folder / "model")
        local = AutoModelForCausalLM.from_pretrained(self.model)
        self.expected = local.generate(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False)
        self.workers = [WorkerProcess(folder, "a", measures=True), WorkerProcess(folder, "b")]

    @property
    def lines(self) -> list[str]:
        return [worker.line for worker in self.workers]

    def ring(self, partition: str | None = "2+2+2", folder: str = "starter", **options: object) -> swarm.Ring:
        return swarm.Ring(
            self.model,
            workers=self.lines,
            partition=partition,
            folder=know_speed(self.folder / folder, "cpu", 1),
            host_maddrs=[LOOPBACK],
            cache_tokens=1024,
            threads=1,
            wire="none",
            **options,
        )

    def close(self) -> None:
        for worker in self.workers:
            worker.process.stop()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    folder = Path(tempfile.mkdtemp(prefix="swr-", dir="/tmp"))  # short, because sockets lie in it
    machines = Machines(folder)
    try:
        yield machines
    finally:
        machines.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_ring_writes_what_the_model_writes_and_leaves_the_workers_idle(machines):
    with machines.ring() as ring:
        assert str(ring.plan) == "2+2+2"
        written = ring.model.generate(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False, lanes="auto")
        assert torch.equal(written, machines.expected)
        assert [sorted(worker.parts) for worker in machines.workers] == [
            ["block-00002.safetensors", "block-00003.safetensors"],
            ["block-00004.safetensors", "block-00005.safetensors"],
        ]
        assert [len(worker.servers) for worker in machines.workers] == [1, 1]
    assert [worker.servers for worker in machines.workers] == [[], []]


def test_another_starter_is_refused(machines):
    with pytest.raises(PairedWithAnother, match="swarm worker --forget"):
        machines.ring(folder="another").start()


@pytest.mark.parametrize(
    ("partition", "options", "error"),
    [("2+2+3", {}, PartitionError), ("2+2+2", {"cache_tokens": 2**40}, NotEnoughMemory)],
)
def test_what_cannot_be_is_said_before_anything_is_sent(machines, partition, options, error):
    options = {"cache_tokens": 1024, **options}
    ring = swarm.Ring(
        machines.model,
        workers=machines.lines,
        partition=partition,
        folder=machines.folder / "starter",
        host_maddrs=[LOOPBACK],
        **options,
    )
    with pytest.raises(error):
        ring.start()
    assert [worker.servers for worker in machines.workers] == [[], []]


@pytest.mark.slow
def test_texts_survive_a_worker_that_is_killed(machines):
    worker = machines.workers[1]
    with machines.ring() as ring:
        half = NEW_TOKENS // 2
        with ring.model.inference_session(max_length=32) as session:
            begun = ring.model.generate(PROMPTS, max_new_tokens=half, do_sample=False)
            worker.kill()
            written = ring.model.generate(begun, max_new_tokens=NEW_TOKENS - half, do_sample=False)
            assert session.position == written.shape[1] - 1
        assert torch.equal(written, machines.expected)
        assert str(ring.plan) == "2+4"
    kept = machines.workers[0].parts
    assert len(kept) == 4
    line = worker.line
    worker.start()
    assert worker.line == line
    with machines.ring() as ring:  # what is there already is not sent again
        written = ring.model.generate(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False, lanes="auto")
        assert torch.equal(written, machines.expected)
        assert machines.workers[0].parts == kept


@pytest.mark.slow
def test_a_ring_survives_its_starter(machines):
    arguments = (
        *("swarm.cli", "ring", str(machines.model), "--workers", machines.lines[0], "--workers", machines.lines[1]),
        *("--folder", str(machines.folder / "starter"), "--host-maddrs", LOOPBACK, "--cache-tokens", "1024"),
        *("--partition", "2+2+2", "--threads", "1", "--save", str(machines.folder / "ring.yaml")),
    )
    environment = {"TMPDIR": str(machines.folder / "tmp"), "HF_HUB_OFFLINE": "1"}
    first = PeerProcess(arguments, environment)
    try:
        address = first.wait_for(r"initial_peers=\['(/ip4/127.0.0.1/tcp/\d+)/p2p")[1]
        servers = [one.pid for worker in machines.workers for one in worker.servers]
        assert len(servers) == 2
    finally:
        first.kill()
    for worker in machines.workers:
        worker.process.wait_for("The starter is gone")
    again = ("swarm.cli", "ring", str(machines.folder / "ring.yaml"), *arguments[7:9], "--host-maddrs", address)
    second = PeerProcess(again, environment)
    try:
        second.wait_for(r"The ring is complete: 2\+2\+2")
        second.wait_for("from_pretrained")
        assert [one.pid for worker in machines.workers for one in worker.servers] == servers
    finally:
        second.stop()
    wait_until(lambda: not any(worker.servers for worker in machines.workers))
    assert not any(map(psutil.pid_exists, servers))


@pytest.mark.slow
def test_a_starter_lets_go_and_another_one_may_come(machines):
    ring = machines.ring()
    assert list(unpair(ring.options).values()) == [True, True]
    other = machines.ring(folder="another")
    assert list(unpair(other.options).values()) == [True, True]  # it has paired for a moment
    assert list(unpair(ring.options).values()) == [True, True]
