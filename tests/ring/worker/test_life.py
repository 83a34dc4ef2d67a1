"""A worker and whoever wants to be its starter, in memory. Times are virtual."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from swarm.errors import PairedWithAnother, PairingRefused, PeerLost, WrongSecret
from swarm.protocol import messages
from swarm.ring.heartbeat import PAIRING_TIMEOUT_S, SILENCE_S
from swarm.ring.starter.worker_link import WorkerLink
from swarm.ring.worker.life import GRACE_S, MAX_PAIRING, WRONG_SECRETS, is_same_work
from tests import virtual_time
from tests.memory_hub import MemoryHub, MemoryNetwork
from tests.ring.rings import STARTER, FakeDuty, MemoryWorker, until


@pytest.fixture
def assignment():
    digests = {part: bytes(32) for part in ("files", "2", "3")}
    return messages.Assign(
        1, "model", "r1", 12, 2, 4, digests, 5, "auto", "none", 1, None, ("/ip4/127.0.0.1/tcp/1/p2p/Qm",), ()
    )


async def pair(hub: MemoryHub, worker: MemoryWorker, line=None, peer_id=STARTER):
    """A link that has paired, and the task that runs it. Raises what the worker refuses with."""
    link = WorkerLink(line or worker.line, peer_id, "laptop", MemoryNetwork(hub, peer_id).open_stream)
    task = asyncio.create_task(link.run())
    await until(lambda: link.is_connected or isinstance(link.error, PairingRefused))
    if not link.is_connected:
        task.cancel()
        assert link.error is not None
        raise link.error
    return link, task


async def end(task):
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def in_memory(tmp_path, scenario, duty=None):
    """Run a scenario with a worker that has started."""

    async def whole():
        hub = MemoryHub()
        worker = MemoryWorker(hub, "a", tmp_path, duty)
        await worker.start()
        try:
            await scenario(hub, worker)
        finally:
            await worker.life.close()
            await hub.close()

    virtual_time.run(whole)


def test_the_first_starter_with_the_secret_is_taken_and_remembered(tmp_path):
    async def scenario(hub, worker):
        link, task = await pair(hub, worker)
        assert link.report.name == "pi"
        assert link.speed.latency >= 0
        assert worker.life.memory.starter == STARTER
        await end(task)
        with pytest.raises(PairedWithAnother, match="paired with another starter"):
            await pair(hub, worker, peer_id="QmAnother")
        worker.life = await worker.start()  # also after a restart
        with pytest.raises(PairedWithAnother):
            await pair(hub, worker, peer_id="QmAnother")
        await end((await pair(hub, worker))[1])

    in_memory(tmp_path, scenario)


def test_a_wrong_secret_is_refused_and_attempts_are_counted(tmp_path):
    async def scenario(hub, worker):
        wrong = replace(worker.line, secret=bytes(16))
        for _ in range(int(WRONG_SECRETS)):
            with pytest.raises(WrongSecret, match="copy the line"):
                await pair(hub, worker, wrong)
        with pytest.raises(PairingRefused, match="too many wrong secrets"):
            await pair(hub, worker)  # the right one, too
        await end((await pair(hub, worker, peer_id="QmHonest"))[1])  # others are not kept out
        assert worker.life.memory.starter == "QmHonest"

    in_memory(tmp_path, scenario)


def test_who_does_not_know_the_secret_does_not_learn_who_the_starter_is(tmp_path):
    async def scenario(hub, worker):
        await end((await pair(hub, worker))[1])
        with pytest.raises(WrongSecret):
            await pair(hub, worker, replace(worker.line, secret=bytes(16)), "QmStranger")

    in_memory(tmp_path, scenario)


def test_an_assignment_is_carried_out_and_released(tmp_path, assignment):
    async def scenario(hub, worker):
        link, task = await pair(hub, worker)
        states = []
        link.on_change = lambda changed: states.append(changed.event.state)
        await link.assign(assignment)
        await until(lambda: link.server_id)
        assert list(dict.fromkeys(states)) == ["receiving", "starting", "online"]
        assert worker.duty.is_running
        assert await link.release()
        assert worker.state == "idle"
        assert not worker.duty.is_running
        assert worker.life.memory.starter == STARTER
        await end(task)

    in_memory(tmp_path, scenario)


def test_an_assignment_outlives_its_starter_for_a_while(tmp_path, assignment):
    async def scenario(hub, worker):
        link, task = await pair(hub, worker)
        await link.assign(assignment)
        await until(lambda: link.server_id)
        await end(task)
        await asyncio.sleep(GRACE_S - 5)
        assert worker.duty.is_running
        link, task = await pair(hub, worker)  # it is back in time, and repeats what it said
        assert link.report.holding == messages.Holding("model", "r1", 2, 4)
        await link.assign(replace_number(assignment, 7))
        await until(lambda: link.server_id)
        assert worker.duty.begun == ["2:4"]  # nothing was begun anew
        await end(task)
        await asyncio.sleep(GRACE_S + 5)
        assert worker.state == "idle"
        assert not worker.duty.is_running

    in_memory(tmp_path, scenario)


def replace_number(assignment, number):
    fields = {name: getattr(assignment, name) for name in assignment.__struct_fields__}
    return messages.Assign(**(fields | {"number": number}))


def test_only_what_matters_makes_other_work(assignment):
    assert is_same_work(assignment, replace_number(assignment, 2))
    fields = {name: getattr(assignment, name) for name in assignment.__struct_fields__}
    holder = messages.WeightHolder("Qm", ())
    assert is_same_work(assignment, messages.Assign(**(fields | {"holders": (holder,)})))
    for change in ({"end": 5}, {"cache_tokens": 2}, {"initial_peers": ("/x",)}, {"revision": "r2"}):
        assert not is_same_work(assignment, messages.Assign(**(fields | change)))


def test_a_failure_is_told_with_its_reason(tmp_path, assignment):
    async def scenario(hub, worker):
        link, task = await pair(hub, worker)
        await link.assign(assignment)
        await until(lambda: link.failure)
        assert link.failure == "no room"
        await link.assign(replace_number(assignment, 2))  # it is tried again when the starter says so
        await until(lambda: link.server_id)
        worker.duty.ended.set()
        await until(lambda: link.failure)
        assert "exit code 1" in link.failure
        await end(task)

    in_memory(tmp_path, scenario, FakeDuty(failures=["no room"]))


def test_a_silent_starter_is_gone(tmp_path, assignment):
    async def scenario(hub, worker):
        link, task = await pair(hub, worker)
        await link.assign(assignment)
        await until(lambda: link.server_id)
        hub.hang(STARTER)
        await asyncio.sleep(SILENCE_S + 5)
        assert not worker.life.status.is_connected
        assert worker.duty.is_running
        hub.resume(STARTER)
        await until(lambda: worker.life.status.is_connected)
        await end(task)

    in_memory(tmp_path, scenario)


def test_strangers_that_say_nothing_do_not_keep_others_out(tmp_path):
    async def scenario(hub, worker):
        network = MemoryNetwork(hub, "QmStranger")
        streams = [await network.open_stream(worker.peer_id) for _ in range(MAX_PAIRING)]
        extra = await network.open_stream(worker.peer_id)
        with pytest.raises(PeerLost):
            await extra.receive(0)
        await asyncio.sleep(PAIRING_TIMEOUT_S + 1)
        await end((await pair(hub, worker))[1])
        for stream in streams:
            stream.close()

    in_memory(tmp_path, scenario)


@pytest.mark.parametrize(
    "message", [messages.StillHere(), messages.Release(True), messages.DescribeDevice(), messages.InfoRequest()]
)
def test_nothing_is_answered_before_pairing(tmp_path, message):
    async def scenario(hub, worker):
        stream = await MemoryNetwork(hub, "QmStranger").open_stream(worker.peer_id)
        assert isinstance(messages.decode_worker((await stream.receive(0)).header), messages.WorkerChallenge)
        await stream.send(message)
        with pytest.raises(PeerLost):
            await stream.receive(0)

    in_memory(tmp_path, scenario)


def test_a_starter_that_breaks_the_rules_is_hung_up_on(tmp_path):
    async def scenario(hub, worker):
        link, task = await pair(hub, worker)
        await link._stream.send(messages.Paired())
        await until(lambda: not link.is_connected)
        await until(lambda: link.is_connected)  # and may begin again
        await end(task)

    in_memory(tmp_path, scenario)
