"""Sequences of messages over sessions of several peers: about half of them right, so that they get far."""

from __future__ import annotations

import random

from swarm.models.checkpoints.checkpoint import open_checkpoint
from tests.fuzz.actor import Actor
from tests.fuzz.attackers import Attackers
from tests.fuzz.kinds import Kind, gather_all
from tests.fuzz.targets import Targets

REACHABLE, HIDDEN = 3, 5
MESSAGES = 20
"""Of each peer in a batch."""


class Sequences(Kind):
    name = "sequences"
    share = 40

    def __init__(self) -> None:
        super().__init__()
        self._attackers = Attackers()

    async def open(self, targets: Targets) -> None:
        self._targets = targets
        self._revision = open_checkpoint(targets.model_folder).revision
        await self._attackers.open(targets, REACHABLE, HIDDEN)

    async def send(self, random: random.Random) -> int:
        peers = random.sample(self._attackers.peers, random.randint(3, len(self._attackers.peers)))
        actors = [self._actor(peer, random) for peer in peers]
        await gather_all(actor.act(MESSAGES) for actor in actors)
        return sum(actor.sent for actor in actors)

    def _actor(self, peer, random_of_batch: random.Random) -> Actor:
        others = [one for one in self._attackers.peers if one is not peer]
        own = random.Random(random_of_batch.getrandbits(64))
        return Actor(peer, others, self._targets.servers, self._revision, own, self.outcomes)

    async def close(self) -> None:
        await self._attackers.close()
