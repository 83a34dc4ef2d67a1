"""The life of a ring, as its starter leads it: collects the workers, assigns blocks, and plans anew when one vanishes.

Workers keep doing what they were assigned while the starter is away, so a starter that begins again takes a ring up as
it is. `swarm.ring.starter.ring_plan` decides which machine holds which blocks; here it is asked and carried out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from swarm.errors import PairingRefused, WorkerFailed, WorkerUnreachable
from swarm.planning.device_group import ModelSize, PipelinePlan
from swarm.protocol.messages import Assign, WeightHolder
from swarm.ring.starter.ring_options import RingOptions
from swarm.ring.starter.ring_plan import (
    RingDevice,
    RingGroup,
    RingPlan,
    best_plan,
    make_group,
    replan,
    resumed_plan,
    told_plan,
)
from swarm.ring.starter.worker_link import WorkerLink
from swarm.shared_weights.manifest import parts_of_blocks

logger = logging.getLogger(__name__)

COLLECT_TIMEOUT_S = 60.0
"""How long the workers may take to answer when a ring starts."""

VANISHED_S = 3.0
"""A worker that served and is lost for so long has vanished: a connection alone comes back sooner."""

START_VANISHED_S = 30.0
"""The same while the ring starts, where a worker that is started again goes on receiving, and nothing is lost yet."""

RETRY_FAILED_S = 60.0
"""A worker whose server ends twice within this time is left out."""

RELEASE_TIMEOUT_S = 35.0


@dataclass(frozen=True)
class RingModel:
    """The model of a ring, and how it is served.

    Attributes:
        name, revision, blocks: as the checkpoint has them.
        size: of its blocks.
        dtype_name: in which the servers compute, such as "bfloat16".
        digests, part_bytes: of every part of its weights: 32 bytes, and how large it is.
        options: of the servers: `dtype`, `quant`, `cache_tokens`, and `threads`.
    """

    name: str
    revision: str
    size: ModelSize
    dtype_name: str
    digests: dict[str, bytes] = field(repr=False)
    part_bytes: dict[str, int] = field(repr=False)
    options: RingOptions

    @property
    def blocks(self) -> int:
        return self.size.blocks


class RingWatcher:
    """Hears what happens to a ring. Its methods are called in the network thread, and may not block.

    Only `on_hashed` is called before the workers are asked, in the thread that starts the ring.
    """

    def on_hashed(self, done_bytes: int, total_bytes: int) -> None:
        """So much of the weights has been read, to compute digests."""

    def on_worker(self, link: WorkerLink) -> None:
        """Something has changed at a worker."""

    def on_plan(self, ring: RingGroup, plan: PipelinePlan) -> None:
        """It is decided which machine holds which blocks when the ring starts."""

    def on_notice(self, text: str) -> None:
        """A line of text for people."""
        logger.info("%s", text)


class StarterLife:
    """One ring. `collect`, `make_plan` and `deploy` in this order; then `watch` until the end, and `release`.

    Args:
        model: what it runs.
        device: the starter's own.
        links: the workers, in the order in which they were given.
        own: how workers reach the starter for weights.
        initial_peers: how their servers reach it.
        partition: the numbers of `--partition`; None for the best plan.
        watcher: hears what happens.

    Attributes:
        servers: peer ids of the workers' servers that are online. The object stays the same and is kept up to date.
        plan: which machine holds which blocks now.
    """

    def __init__(
        self,
        model: RingModel,
        device: RingDevice,
        links: Sequence[WorkerLink],
        own: WeightHolder,
        initial_peers: tuple[str, ...],
        partition: Sequence[int] | None = None,
        watcher: RingWatcher | None = None,
    ) -> None:
        self.model = model
        self.links = {link.line.peer_id: link for link in links}
        self.servers: set[str] = set()
        self.plan: RingPlan | None = None
        self._device = device
        self._own = own
        self._initial_peers = initial_peers
        self._partition = partition
        self._watcher = watcher or RingWatcher()
        self._changed = asyncio.Event()
        self._number = 0
        self._left_out: set[str] = set()
        self._failed_at: dict[str, float] = {}
        self._spares: set[str] = set()
        """Workers without blocks that are connected, and were told to end what they ran."""
        self._releasing: set[asyncio.Task[bool]] = set()
        self._said: set[str] = set()
        """What was said since the ring was complete."""
        for link in links:
            link.on_change = self._note_change

    @property
    def has_assigned(self) -> bool:
        """Whether workers were given anything to do."""
        return self._number > 0

    def _note_change(self, link: WorkerLink) -> None:
        self._watcher.on_worker(link)
        self._update_servers()
        self._changed.set()

    async def collect(self) -> None:
        """Wait until all workers are there.

        Raises:
            PairingRefused: a worker does not take this starter; the subclass says why.
            WorkerUnreachable: a worker does not answer.
        """
        deadline = time.monotonic() + COLLECT_TIMEOUT_S
        while missing := [link for link in self.links.values() if not link.is_connected]:
            for link in missing:
                if isinstance(link.error, PairingRefused):
                    raise link.error
            if not await self._wait_for_change(deadline - time.monotonic()):
                first = missing[0]
                why = f": {first.error}" if first.error is not None else ""
                raise WorkerUnreachable(
                    f"worker {first.line} does not answer after {COLLECT_TIMEOUT_S:.0f} s{why}. Check that `swarm "
                    "worker` runs there, that both machines are in one network, and that the line is the one that it "
                    "prints now"
                )

    def make_plan(self) -> None:
        """Decide which machine holds which blocks: as told, as the workers hold it already, or what is fastest.

        Raises:
            PartitionError: the partition does not fit the model or the workers.
            NotEnoughMemory: the devices cannot hold the blocks.
        """
        ring, model = self._group(), self.model
        if self._partition is not None:
            ring = replace(ring, group=replace(ring.group, fixed_order=True))
            self.plan = told_plan(ring, self._partition)
        else:
            reports = {key: link.report for key, link in self.links.items()}
            holdings = {key: one.holding for key, one in reports.items() if one is not None}
            self.plan = resumed_plan(holdings, model.name, model.revision, model.blocks)
        plan = ring.pipeline_plan(self.plan) if self.plan is not None else best_plan(ring)
        self.plan = ring.ring_plan(plan)
        self._watcher.on_plan(ring, plan)

    async def deploy(self) -> None:
        """Assign the blocks, and wait until all workers serve theirs.

        Raises:
            WorkerFailed: a worker cannot do what it was assigned.
        """
        await self._apply()
        while not self._is_complete():
            for key in self._assigned():
                if (failure := self.links[key].failure) is not None:
                    raise WorkerFailed(f"worker {self.links[key].line}: {failure}")
            await self._replace_vanished(START_VANISHED_S)
            await self._wait_for_change(1.0)

    async def watch(self) -> None:
        """Keep the ring complete until cancelled."""
        while True:
            self._update_servers()
            await self._retry_failed()
            await self._replace_vanished(VANISHED_S)
            self._release_spares()
            if self._is_complete() and self._said:
                self._said.clear()
                self._watcher.on_notice(f"The ring is complete again: {self.plan}")
            await self._wait_for_change(1.0)

    async def release(self, unpair: bool = False) -> list[WorkerLink]:
        """End all assignments. Returns the workers that did not confirm it; they end by themselves a little later."""
        links = list(self.links.values())
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await asyncio.gather(*self._releasing)
                done = await asyncio.gather(*(link.release(unpair) for link in links))
        except TimeoutError:
            return links
        return [link for link, is_done in zip(links, done, strict=True) if not is_done]

    def _update_servers(self) -> None:
        there = (link for key, link in self.links.items() if not self._is_lost(key, VANISHED_S))
        online = {link.event.server_id for link in there if link.event.server_id is not None}
        self.servers |= online
        self.servers &= online

    def _group(self) -> RingGroup:
        """The devices of all workers that have ever answered."""
        workers = []
        for key, link in self.links.items():
            report, speed = link.report, link.speed
            assert report is not None, "every worker has answered once"
            assert speed is not None
            rates = {str(name): rate for name, rate in report.read_rates.items()}
            workers.append(
                RingDevice(key, report.name, report.memory, rates, report.block_seconds, speed.latency, speed.bandwidth)
            )
        model = self.model
        return make_group(self._device, workers, model.size, model.dtype_name, model.options.cache_tokens)

    async def _apply(self) -> None:
        """Tell all workers what they hold by the plan."""
        assert self.plan is not None
        self._number += 1
        assigned = {part.worker: part.span for part in self.plan.parts}
        for key, link in self.links.items():
            span = assigned.get(key)
            if span is None:
                if link.assignment is not None or link.event.state != "idle":
                    self._release_meanwhile(link)
                continue
            model = self.model
            others = [WeightHolder(other, self.links[other].line.addresses) for other in self.links if other != key]
            await link.assign(
                Assign(
                    number=self._number,
                    model=model.name,
                    revision=model.revision,
                    blocks=model.blocks,
                    start=span.start,
                    end=span.end,
                    digests=model.digests,
                    total_bytes=sum(model.part_bytes[part] for part in parts_of_blocks(span.start, span.end)),
                    dtype=model.options.dtype,
                    quant=model.options.quant,
                    cache_tokens=model.options.cache_tokens,
                    threads=model.options.threads,
                    initial_peers=self._initial_peers,
                    holders=(self._own, *others),
                )
            )

    def _assigned(self) -> tuple[str, ...]:
        return self.plan.workers if self.plan is not None else ()

    def _is_complete(self) -> bool:
        return all(self.links[key].is_connected and self.links[key].server_id is not None for key in self._assigned())

    def _is_lost(self, key: str, vanished_s: float) -> bool:
        link = self.links[key]
        return not link.is_connected and time.monotonic() - link.lost_since >= vanished_s

    async def _replace_vanished(self, vanished_s: float) -> None:
        """Plan anew without the workers that have vanished, if the rest can hold the model; else say that it waits."""
        assert self.plan is not None
        vanished = [key for key in self._assigned() if key in self._left_out or self._is_lost(key, vanished_s)]
        if not vanished:
            return
        present = [key for key, link in self.links.items() if link.is_connected and key not in self._left_out]
        names = " and ".join(str(self.links[key].line) for key in vanished)
        plan = replan(self._group(), self.plan, present)
        if plan is None:
            spans = {part.worker: part.span for part in self.plan.parts}
            blocks = " and ".join(str(spans[key]) for key in vanished)
            self._say(
                f"vanished {vanished}",
                f"Lost: {names}, which held blocks {blocks}. The other devices cannot hold them too, so the ring waits "
                "for it to come back",
            )
            self._left_out -= set(vanished)  # there is no other way than to try again
            return
        self._say(f"planned {plan}", f"Lost: {names}. The others take its blocks: {plan}, it was {self.plan}")
        self.plan = plan
        await self._apply()

    def _release_meanwhile(self, link: WorkerLink) -> None:
        """Have a worker end what it runs, which may take seconds for which no other should wait."""
        task = asyncio.create_task(link.release())
        self._releasing.add(task)
        task.add_done_callback(self._releasing.discard)

    def _release_spares(self) -> None:
        """Have workers that came back after others have taken their blocks end what they still run."""
        for key, link in self.links.items():
            if key in self._assigned() or not link.is_connected:
                self._spares.discard(key)
            elif key not in self._spares:
                self._spares.add(key)
                if link.event.state != "idle":
                    self._release_meanwhile(link)
                self._watcher.on_notice(f"Worker {link.line} has no blocks now; it steps in if another one vanishes")

    async def _retry_failed(self) -> None:
        """Have a worker whose server has ended start it again; the second time, others take its blocks."""
        now, again = time.monotonic(), False
        for key in self._assigned():
            link = self.links[key]
            if link.failure is None or not link.is_connected:
                continue
            recently = now - self._failed_at.get(key, float("-inf")) < RETRY_FAILED_S
            self._say(f"failed {key} {now}", f"Worker {link.line} failed: {link.failure}")
            if recently:
                self._left_out.add(key)
            self._failed_at[key] = now
            again = True
        if again:
            await self._apply()

    def _say(self, key: str, text: str) -> None:
        """Say something once, until the ring is complete again."""
        if key not in self._said:
            self._said.add(key)
            self._watcher.on_notice(text)

    async def _wait_for_change(self, timeout_s: float) -> bool:
        """Wait for a change at a link; False if there was none in time."""
        try:
            async with asyncio.timeout(max(timeout_s, 0.0)):
                await self._changed.wait()
        except TimeoutError:
            return False
        self._changed.clear()
        return True
