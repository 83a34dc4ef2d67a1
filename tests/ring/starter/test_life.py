"""Rings in memory: their start, workers and starters that vanish, and their end. Times are virtual."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swarm.errors import NotEnoughMemory, PartitionError, WorkerUnreachable
from swarm.ring.starter.life import VANISHED_S
from swarm.ring.worker.life import GRACE_S
from tests import virtual_time
from tests.memory_hub import MemoryHub
from tests.ring.rings import BLOCK_BYTES, BLOCKS, FakeDuty, MemoryWorker, starter, until


class Scene:
    """A hub with workers a, b, ..."""

    def __init__(self, folder, *duties):
        self.hub = MemoryHub()
        self.workers = [MemoryWorker(self.hub, chr(ord("a") + n), folder, duty) for n, duty in enumerate(duties)]
        self.lines = [worker.line for worker in self.workers]

    @asynccontextmanager
    async def ring(self, partition=None):
        """A starter that has deployed, and watches."""
        async with starter(self.hub, self.lines, partition) as (life, notices):
            await life.collect()
            life.make_plan()
            await life.deploy()
            watching = asyncio.create_task(life.watch())
            try:
                yield life, notices
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)


def play(tmp_path, scenario, *duties):
    async def whole():
        scene = Scene(tmp_path, *duties)
        for worker in scene.workers:
            await worker.start()
        try:
            await scenario(scene)
        finally:
            for worker in scene.workers:
                await worker.life.close()
            await scene.hub.close()

    virtual_time.run(whole)


def test_a_ring_starts_and_ends(tmp_path):
    async def scenario(scene):
        async with scene.ring((2, 5, 5)) as (life, _):
            assert [worker.duty.begun for worker in scene.workers] == [["2:7"], ["7:12"]]
            assert len(life.servers) == 1  # both are called alike here
            assert await life.release() == []
            assert [worker.state for worker in scene.workers] == ["idle", "idle"]
            await until(lambda: not life.servers)

    play(tmp_path, scenario, FakeDuty(), FakeDuty())


def test_a_worker_that_does_not_answer_is_named(tmp_path):
    async def scenario(scene):
        await scene.workers[1].kill()
        async with starter(scene.hub, scene.lines) as (life, _):
            with pytest.raises(WorkerUnreachable, match=r"worker b \(…orkerB\) does not answer"):
                await life.collect()

    play(tmp_path, scenario, FakeDuty(), FakeDuty())


@pytest.mark.parametrize(("partition", "error"), [((2, 9), NotEnoughMemory), ((2, 5), PartitionError)])
def test_a_partition_that_cannot_be_assigns_nothing(tmp_path, partition, error):
    async def scenario(scene):
        async with starter(scene.hub, scene.lines, (12 - partition[1], *partition[1:])) as (life, _):
            await life.collect()
            if error is PartitionError:
                life._partition = partition
            with pytest.raises(error):
                life.make_plan()
            assert not life.has_assigned
            assert scene.workers[0].duty.begun == []

    play(tmp_path, scenario, FakeDuty(memory=5 * BLOCK_BYTES))


def test_others_take_the_blocks_of_a_worker_that_vanishes(tmp_path):
    async def scenario(scene):
        async with scene.ring((2, 5, 5)) as (life, notices):
            await scene.workers[1].kill()
            began = asyncio.get_running_loop().time()
            await until(lambda: scene.workers[0].duty.begun == ["2:7", "2:12"])
            assert asyncio.get_running_loop().time() - began < VANISHED_S + 3
            await until(lambda: "The ring is complete again: 2+10" in notices.said)
            assert scene.workers[0].duty.received == list(range(2, 12))  # nothing came twice
            assert any("Lost: b" in text and "2+10, it was 2+5+5" in text for text in notices.said)
            await scene.workers[1].start()  # it is back, and has nothing to do
            await until(lambda: any("steps in if another one vanishes" in text for text in notices.said))
            await scene.workers[0].kill()
            await until(lambda: scene.workers[1].duty.is_running)
            await until(lambda: life.plan.numbers == (2, 10))
            assert life.plan.workers == (scene.workers[1].peer_id,)

    play(tmp_path, scenario, FakeDuty(), FakeDuty())


def test_a_worker_that_cannot_be_replaced_is_waited_for(tmp_path):
    async def scenario(scene):
        async with scene.ring((2, 5, 5)) as (_, notices):
            await scene.workers[1].kill()
            await asyncio.sleep(600)
            waiting = [text for text in notices.said if "waits for it to come back" in text]
            assert len(waiting) == 1
            assert "which held blocks 7:12" in waiting[0]
            await scene.workers[1].start()
            await until(lambda: "The ring is complete again: 2+5+5" in notices.said)
            assert scene.workers[1].duty.received == list(range(7, 12))  # its folder still had them
            assert scene.workers[0].duty.begun == ["2:7"]

    play(tmp_path, scenario, FakeDuty(memory=7 * BLOCK_BYTES), FakeDuty(memory=7 * BLOCK_BYTES))


def test_a_starter_that_is_started_again_takes_the_ring_up_as_it_is(tmp_path):
    async def scenario(scene):
        async with scene.ring((3, 4, 5)):
            pass  # it dies
        await asyncio.sleep(GRACE_S / 2)
        async with scene.ring() as (life, _):  # without a partition
            assert life.plan.numbers == (3, 4, 5)
            assert [worker.duty.begun for worker in scene.workers] == [["3:7"], ["7:12"]]

    play(tmp_path, scenario, FakeDuty(), FakeDuty())


def test_a_server_that_ends_is_started_again_and_the_second_time_replaced(tmp_path):
    async def scenario(scene):
        async with scene.ring((2, 5, 5)) as (life, notices):
            scene.workers[1].duty.ended.set()
            await until(lambda: scene.workers[1].duty.begun == ["7:12", "7:12"])
            await until(lambda: scene.workers[1].duty.is_running)
            scene.workers[1].duty.ended.set()
            await until(lambda: life.plan.numbers == (2, 10))
            await until(lambda: scene.workers[0].duty.is_running)
            assert sum("failed: the server ended with exit code 1" in text for text in notices.said) == 2

    play(tmp_path, scenario, FakeDuty(), FakeDuty())


@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["kill", "start", "hang", "resume", "crash"])), max_size=8)
)
@example([(1, "kill"), (0, "start"), (0, "start"), (0, "kill")])
@settings(max_examples=20)
def test_whatever_happens_the_ring_is_complete_in_the_end(tmp_path_factory, events):
    async def scenario(scene):
        async with scene.ring((3, 3, 3, 3)) as (life, _):
            alive = {0, 1, 2}
            for number, event in events:
                worker = scene.workers[number]
                if event == "kill" and number in alive:
                    alive.discard(number)
                    await worker.kill()
                elif event == "start" and number not in alive:
                    alive.add(number)
                    await worker.start()
                elif event == "hang":
                    scene.hub.hang(worker.peer_id)
                elif event == "resume":
                    scene.hub.resume(worker.peer_id)
                elif event == "crash" and worker.duty.is_running:
                    worker.duty.ended.set()
                await asyncio.sleep(2.5)
            for number, worker in enumerate(scene.workers):
                scene.hub.resume(worker.peer_id)
                if number not in alive:
                    await worker.start()
            await asyncio.sleep(60)
            running = {worker.peer_id: worker for worker in scene.workers if worker.duty.is_running}
            covered = sorted((part.span.start, part.span.end) for part in life.plan.parts)
            assert covered[0][0] == 3
            assert covered[-1][1] == BLOCKS
            for part in life.plan.parts:
                assert running[part.worker].duty.begun[-1] == str(part.span)
            assert set(running) == set(life.plan.workers)

    play(tmp_path_factory.mktemp("ring"), scenario, FakeDuty(), FakeDuty(), FakeDuty())
