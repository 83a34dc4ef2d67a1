"""What a gateway's requests share."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.data_structures import Span
from swarm.gateway.failures import Unavailable
from swarm.gateway.service import ServedModel, Service, Settings
from swarm.metrics.registry import new_registry


def service(looks: list[None], held: int) -> Service:
    def servers() -> list[Any]:
        looks.append(None)
        return [SimpleNamespace(span=Span(0, held))]

    swarm = SimpleNamespace(listen=lambda listener: None, servers=servers, span=Span(0, 4), close=lambda: None)
    return Service([ServedModel("m", SimpleNamespace(swarm=swarm), None)], Settings(), None, new_registry())


def test_many_who_ask_whether_it_is_ready_are_one_look():
    looks: list[None] = []
    shared = service(looks, held=4)

    async def work() -> None:
        await asyncio.gather(*(shared.check_ready() for _ in range(50)))

    asyncio.run(work())
    shared.close()
    assert len(looks) == 1


def test_blocks_that_nobody_holds_are_named():
    shared = service([], held=2)
    with pytest.raises(Unavailable, match="nobody holds blocks 2:4 of m"):
        asyncio.run(shared.check_ready())
    shared.close()
