"""Hostile servers against a real client over real libp2p, in the swarm that is attacked.

They announce blocks that honest servers hold as well. Only this module's client takes them for quick ones, and only it
is lied to, so that no other client of the swarm is led by them.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from swarm import EarlyExit
from swarm.client.config import NetworkOptions
from swarm.client.model.auto_model import AutoDistributedModelForCausalLM
from swarm.client.threads.network_thread import NetworkThread
from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.server.config import BlocksOption, ServerConfig
from swarm.server.throughput.throughput_cache import ThroughputOption
from swarm.transport.p2p import P2PConfig
from swarm.transport.ping import ping_many
from tests.bad_peers import ATTRACTIVE, BadServer
from tests.disturbances import greedy
from tests.fuzz.replies.hostile_streams import HostileStream, Mischief
from tests.fuzz.replies.in_memory import RepliesViolation
from tests.swarms import LOOPBACK

PROMPTS = 4
PROMPT_TOKENS = 9
NEW = 12
AT_ONCE = 3
"""Conversations of one game, so that what one waits for does not hold up the others."""

LONGEST_CALL_S = 120.0
SETTLE_S = 20.0
"""Seconds after which nothing may be left of a conversation."""

MAX_MORE_DESCRIPTORS = 12
MAX_MORE_BYTES = 150 << 20
TOLERANCE = 1e-3

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 2},
    "lanes": {"lanes": 2},
    "speculation": {"prompt_lookup_num_tokens": 3},
    "exits": {"early_exit": EarlyExit(threshold=0.3)},
}


class HostilePeers:
    """Servers in this process that lie to one client.

    Args:
        spans: their blocks.
    """

    def __init__(self, model: Path, addresses: Sequence[str], spans: Sequence[str], folder: Path) -> None:
        self.mischief = Mischief(victim="nobody yet", is_quick=True)
        self.background = NetworkThread()
        self._servers: list[BadServer] = []
        for span in spans:
            config = ServerConfig(
                model=str(model),
                blocks=BlocksOption.parse(span),
                p2p=P2PConfig(initial_peers=tuple(addresses), host_maddrs=LOOPBACK),
                throughput=ThroughputOption(1e-3),
                throughput_cache=folder / "throughput.json",
                stay=True,
                update_period=10.0,
                threads=1,
                dtype="float32",
            )
            self._servers.append(BadServer(config, wrap=partial(HostileStream, mischief=self.mischief)))
        self.background.run(self._start())

    async def _start(self) -> None:
        await asyncio.gather(*(server.start() for server in self._servers))

    @property
    def peer_ids(self) -> frozenset[str]:
        return frozenset(server.peer.peer_id for server in self._servers)

    def close(self) -> None:
        self.mischief.enabled = False
        for server in self._servers:
            self.background.run(server.stop())
        self.background.close()


class HostileTable:
    """A client among hostile servers, and the texts that it has to write all the same."""

    def __init__(self, model: Path, addresses: Sequence[str], spans: Sequence[str], folder: Path) -> None:
        self._stack = ExitStack()
        local = load_local_model(model)
        generator = torch.Generator().manual_seed(1)
        shape = (1, PROMPT_TOKENS)
        self.prompts = [torch.randint(5, 300, shape, generator=generator) for _ in range(PROMPTS)]
        self._expected = {
            (number, beams): greedy(local, prompt, NEW, num_beams=beams)
            for number, prompt in enumerate(self.prompts)
            for beams in {settings.get("num_beams", 1) for settings in WAYS.values()}
        }
        self._logits = [_logits(local, prompt) for prompt in self.prompts]
        self._gradients = [_gradient(local, prompt) for prompt in self.prompts]
        self.hostile = HostilePeers(model, addresses, spans, folder)
        self._stack.callback(self.hostile.close)
        self.mischief = self.hostile.mischief
        self.client = AutoDistributedModelForCausalLM.from_pretrained(
            str(model),
            initial_peers=tuple(addresses),
            dtype="float32",
            wire="none",
            network=NetworkOptions(wait_for_blocks=20.0),
        )
        self._stack.callback(self.client.swarm.close)
        self.mischief.victim = self.client.swarm._peer.peer_id
        self._prefer_hostile_servers()
        self.mischief.make_forgiving(self.client.swarm._planner.router.health, self.hostile.peer_ids)
        for number in range(PROMPTS):  # honest at first
            self._write(number, "greedy")
        self._descriptors = psutil.Process().num_fds()
        self._bytes = psutil.Process().memory_info().rss
        self._tasks = self._count_tasks()

    def play(self, chance: random.Random) -> float:
        """Some conversations at once; seconds that the longest of them took."""
        self._forgive()
        errors = list[BaseException]()
        began = time.monotonic()
        self.mischief.begin(chance, keeps_values=chance.random() < 0.7)
        works = [self._choose(chance) for _ in range(AT_ONCE)]

        def run(work: Callable[[], object]) -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONGEST_CALL_S)
        self.mischief.enabled = False
        seconds = time.monotonic() - began
        if any(thread.is_alive() for thread in threads):
            raise RepliesViolation(f"a call took more than {LONGEST_CALL_S:.0f} s; {self.mischief.log}")
        for error in errors:
            if not (isinstance(error, AssertionError) and self.mischief.may_deceive(order_is_certain=False)):
                error.add_note("lies: " + " | ".join(self.mischief.log))
                raise error
        self._expect_nothing_left()
        return seconds

    def close(self) -> None:
        """Nothing has grown; then everything ends."""
        try:
            self.client.swarm._requester.close()
            grown = psutil.Process().memory_info().rss - self._bytes
            if grown > MAX_MORE_BYTES:
                raise RepliesViolation(f"the client has grown by {grown >> 20} MiB")
        finally:
            self._stack.close()

    def _choose(self, chance: random.Random) -> Callable[[], object]:
        number = chance.randrange(PROMPTS)
        way = chance.choice(["greedy", *WAYS, "logits", "gradients", "ping"])
        match way:
            case "logits":
                return lambda: _close(_logits(self.client, self.prompts[number]), self._logits[number])
            case "gradients":
                return lambda: _close(_gradient(self.client, self.prompts[number]), self._gradients[number])
            case "ping":
                return self._ping
            case _:
                return lambda: self._write(number, way)

    def _write(self, number: int, way: str) -> None:
        found, expected = greedy(self.client, self.prompts[number], NEW, **WAYS[way]), self._expected
        right = expected[number, WAYS[way].get("num_beams", 1)]
        assert found == right, f"{way}: {found} where {right} was right"

    def _ping(self) -> None:
        swarm = self.client.swarm
        swarm.run(ping_many(swarm._peer, self.hostile.peer_ids))

    def _prefer_hostile_servers(self) -> None:
        """This client alone takes hostile servers for quick ones."""
        router, hostile = self.client.swarm._planner.router, self.hostile.peer_ids
        update = router.update

        def prefer(servers: Any, *more: Any) -> None:
            quick = {"throughput": ATTRACTIVE, "forward_throughput": ATTRACTIVE}
            update([replace(one, **quick) if one.peer_id in hostile else one for one in servers], *more)

        router.update = prefer
        deadline = time.monotonic() + SETTLE_S
        while not hostile <= {server.peer_id for server in self.client.swarm.servers()}:
            if time.monotonic() > deadline:
                raise RepliesViolation("the hostile servers are not announced")
            time.sleep(0.1)

    def _forgive(self) -> None:
        """The client forgets what hostile servers did, or it would never ask them again."""
        router = self.client.swarm._planner.router
        for peer_id in self.hostile.peer_ids:
            router.health._records.pop(peer_id, None)
        router.links._until.clear()

    def _expect_nothing_left(self) -> None:
        """Nobody honest is banned; no task and no descriptor is left."""
        router = self.client.swarm._planner.router
        if banned := router.health.banned_peers(time.monotonic()) - self.hostile.peer_ids:
            reasons = {peer: router.health.reasons(peer) for peer in banned}
            raise RepliesViolation(f"honest servers are banned: {reasons}; lies: {self.mischief.log}")
        deadline = time.monotonic() + SETTLE_S
        while True:
            self.client.swarm._requester.close()
            tasks, descriptors = self._count_tasks(), psutil.Process().num_fds()
            if tasks <= self._tasks and descriptors <= self._descriptors + MAX_MORE_DESCRIPTORS:
                return
            if time.monotonic() > deadline:
                raise RepliesViolation(
                    f"{tasks} tasks where {self._tasks} were, {descriptors} descriptors where {self._descriptors} "
                    f"were; lies: {self.mischief.log}"
                )
            time.sleep(0.05)

    def _count_tasks(self) -> int:
        """Tasks of the client that belong to its sessions and requests."""

        async def count() -> int:
            return sum("swarm/client" in (task.get_coro().cr_code.co_filename) for task in asyncio.all_tasks())  # type: ignore[union-attr]

        return int(self.client.swarm.run(count()))


def _logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(prompt).logits  # type: ignore[no-any-return]


def _gradient(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Of the mean of the outputs' squares with respect to the embeddings."""
    embedded_STH = model.get_input_embeddings()(prompt).detach().requires_grad_()
    outputs = model(inputs_embeds=embedded_STH).logits
    (gradient_STH,) = torch.autograd.grad(outputs.square().mean(), embedded_STH)
    return gradient_STH


def _close(found: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=0, atol=TOLERANCE * float(right.abs().max()))
