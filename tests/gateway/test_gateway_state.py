"""The state that a gateway's requests share."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.data_structures import Span
from swarm.gateway import api_keys
from swarm.gateway.api_keys import ApiKey, KeyFile, KeyLimits
from swarm.gateway.gateway_state import PREPARATION_THREADS, GatewayState
from swarm.gateway.openai.api_errors import ServiceUnavailable
from swarm.gateway.settings import GatewaySettings
from swarm.generation.served_model import ServedModel
from swarm.metrics.registry import new_registry
from tests.models.tokenizers.prompts_here import prompts_here


def service(looks: list[None], held: int, key_file: KeyFile | None = None) -> GatewayState:
    def servers() -> list[Any]:
        looks.append(None)
        return [SimpleNamespace(span=Span(0, held))]

    swarm = SimpleNamespace(add_listener=lambda listener: None, servers=servers, span=Span(0, 4), close=lambda: None)
    return GatewayState(
        [ServedModel("m", SimpleNamespace(swarm=swarm), None, prompts_here(None))],
        GatewaySettings(),
        key_file,
        new_registry(),
    )


def test_concurrent_readiness_requests_share_one_check():
    looks: list[None] = []
    shared = service(looks, held=4)

    async def work() -> None:
        await asyncio.gather(*(shared.check_ready() for _ in range(50)))

    asyncio.run(work())
    shared.close()
    assert len(looks) == 1


def test_missing_blocks_are_named():
    shared = service([], held=2)
    with pytest.raises(ServiceUnavailable, match="no server holds blocks 2:4 of m"):
        asyncio.run(shared.check_ready())
    shared.close()


def test_changed_keys_are_read_outside_of_the_event_loop(tmp_path, monkeypatch):
    path = tmp_path / "keys.yaml"
    first = api_keys.add_key(path, "ann", KeyLimits())
    shared = service([], 4, KeyFile.read(path))
    readers: list[threading.Thread] = []
    read = KeyFile.read

    def watched(path: Path) -> KeyFile:
        readers.append(threading.current_thread())
        return read(path)

    monkeypatch.setattr(KeyFile, "read", watched)

    async def known(*secrets: str) -> list[bool]:
        found = await asyncio.gather(*(shared.keys() for _ in range(20)))
        assert all(one is found[0] for one in found)
        return [found[0].find(secret) is not None for secret in secrets]

    async def work() -> None:
        assert await known(first) == [True]
        second = api_keys.add_key(path, "ben", KeyLimits())
        assert await known(first, second) == [True, True]
        api_keys.remove_key(path, "ann")
        assert await known(first, second) == [False, True]

    asyncio.run(work())
    shared.close()
    assert len(readers) == 2
    assert threading.current_thread() not in readers


def test_requests_that_end_early_give_their_threads_back():
    shared, ann, busy, may_end = service([], 4), ApiKey("ann", KeyLimits()), threading.Semaphore(0), threading.Event()
    made: list[str] = []

    def long() -> None:
        busy.release()
        may_end.wait(60)

    async def work() -> None:
        for steps in range(8):  # at any step of theirs
            early = asyncio.ensure_future(shared.run_in_thread(ann, bool))
            for _ in range(steps):
                await asyncio.sleep(0)
            early.cancel()
            await asyncio.wait({early})
        first = [asyncio.ensure_future(shared.run_in_thread(ann, long)) for _ in range(PREPARATION_THREADS // 2)]
        for _ in first:
            assert await asyncio.to_thread(busy.acquire, timeout=60)
        first[0].cancel()  # keeps its thread: the work cannot be stopped
        waits = asyncio.ensure_future(shared.run_in_thread(ann, lambda: made.append("of the request that ended")))
        last = asyncio.ensure_future(shared.run_in_thread(ann, lambda: made.append("of the request that waited")))
        await shared.run_in_thread(ApiKey("ben", KeyLimits()), lambda: made.append("of another key"))
        assert not first[0].done()
        waits.cancel()
        may_end.set()
        await asyncio.wait({*first, waits, last}, timeout=60)
        assert first[0].cancelled()
        assert waits.cancelled()
        assert last.done()

    asyncio.run(work())
    shared.close()
    assert made == ["of another key", "of the request that waited"]
