"""A client's picture of the swarm: when it is renewed, and what is kept out of routes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.client.config import ClientConfig, ModelIdentity
from swarm.client.routes import route_planner as module
from swarm.client.routes.route_planner import (
    IDLE_REFRESH_PERIOD_S,
    IDLE_TIMEOUT_S,
    REFRESH_TIMEOUT_S,
    STALE_REFRESH_TIMEOUT_S,
    RoutePlanner,
)
from swarm.data_structures import ModelInfo, ServerInfo, Span
from swarm.errors import (
    CacheFull,
    MissingBlocks,
    NotFinite,
    NotFiniteOutputs,
    PeerLost,
    PeerTimeout,
    ProtocolViolation,
    ServerClosing,
    ServerFault,
    UnknownSession,
    WrongSpan,
)
from swarm.routing.peer_health import PeerFailure
from tests import virtual_time
from tests.infos import server_info
from tests.swarms import group_options

ALL = Span(0, 6)


class World:
    """What the DHT and the pings of a test say."""

    def __init__(self) -> None:
        self.servers: list[ServerInfo] = [
            server_info(0, 3, "a", throughput=100.0),
            server_info(3, 6, "b", throughput=100.0),
            server_info(0, 3, "c", throughput=1.0),
            server_info(3, 6, "d", throughput=1.0),
        ]
        self.looks: list[float] = []
        self.look_takes = 0.1
        self.error: Exception | None = None
        self.pings: list[list[str]] = []
        self.ping_takes = 0.2
        self.round_trips: dict[str, float] = {}
        self.told: list[Any] = []
        self.models = [ModelInfo("the model", 6, "main"), ModelInfo("another\x1b[2J", 6, "main")]
        self.dht: Any = SimpleNamespace(served=set())

    async def fetch(self, dht: Any, model: str, blocks: int) -> list[ServerInfo]:
        assert (dht, model, blocks) == (self.dht, "the model", 6)
        self.looks.append(now())
        await asyncio.sleep(self.look_takes)
        if self.error is not None:
            raise self.error
        return self.servers

    async def list_models(self, dht: Any) -> list[ModelInfo]:
        if self.error is not None:
            raise self.error
        return self.models

    async def ping(self, peer: Any, candidates: Any) -> dict[str, float]:
        self.pings.append(list(candidates))
        await asyncio.sleep(self.ping_takes)
        return self.round_trips


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def play(act: Callable[[World, RoutePlanner], Awaitable[None]], **options: Any) -> None:
        world = World()
        monkeypatch.setattr(module, "fetch_servers", world.fetch)
        monkeypatch.setattr(module, "fetch_models", world.list_models)
        monkeypatch.setattr(module, "ping_many", world.ping)

        async def scenario() -> None:
            peer: Any = SimpleNamespace(dht=world.dht)
            config = ClientConfig(("somebody",), **group_options(options))
            planner = RoutePlanner(peer, config, ModelIdentity("the model", "main", 6), world.told.append)
            try:
                await act(world, planner)
            finally:
                await planner.close()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            assert all("scenario" in repr(task) or "whole" in repr(task) for task in others)

        virtual_time.run(scenario)

    return play


async def route(planner: RoutePlanner, span: Span = ALL) -> str:
    found = await planner.route(span, None, None, 100)
    return " ".join(f"{hop.span}{hop.server.peer_id}" for hop in found.hops)


def test_the_first_route_waits_for_announcements_and_pings(play):
    async def act(world, planner):
        world.round_trips = {"a": 5.0, "b": 0.01, "c": 0.01, "d": 0.01}
        assert planner.servers == ()
        assert await route(planner) == "0:3c 3:6b"
        assert now() == pytest.approx(0.3)
        assert sorted(world.pings[0]) == ["a", "b", "c", "d"]
        began = now()
        assert await route(planner) == "0:3c 3:6b"
        assert now() == began
        assert len(world.looks) == 1
        assert planner.servers == tuple(world.servers)

    play(act)


REASONS = [
    (PeerTimeout("x"), PeerFailure.TIMED_OUT),
    (PeerLost("x"), PeerFailure.UNREACHABLE),
    (ProtocolViolation("x"), PeerFailure.WRONG_ANSWER),
    (NotFiniteOutputs("x"), PeerFailure.SUSPECTED),
    (CacheFull("x"), PeerFailure.CACHE_FULL),
    (ServerClosing("x"), PeerFailure.CLOSING),
    (WrongSpan("x"), PeerFailure.CLOSING),
    (UnknownSession("x"), PeerFailure.REFUSED),
    (NotFinite("x"), PeerFailure.REFUSED),
    (ServerFault("x"), PeerFailure.FAULT),
    (RuntimeError("x"), PeerFailure.FAULT),
]


def test_a_server_that_failed_is_avoided_for_as_long_as_its_reason_says(play):
    for error, reason in REASONS:

        async def act(world, planner, error=error, reason=reason):
            assert await route(planner) == "0:3a 3:6b"
            planner.report_failure("a", error)
            assert planner.router.health.reasons("a") == (reason,)
            assert await route(planner) == "0:3c 3:6b"
            await planner.refresh()
            assert await route(planner) == "0:3c 3:6b"  # that it is still announced says nothing
            await asyncio.sleep(reason.ban_seconds + 0.1)
            assert await route(planner) == "0:3a 3:6b"

        play(act, refresh_period=1000.0)


def test_a_set_of_allowed_servers_may_change(play):
    allowed = set("ad")

    async def act(world, planner):
        assert await route(planner) == "0:3a 3:6d"
        allowed.symmetric_difference_update("ac")
        await planner.refresh()
        assert await route(planner) == "0:3c 3:6d"

    play(act, allowed_servers=allowed)


def test_a_failed_refresh_keeps_the_snapshot(play):
    async def act(world, planner):
        await route(planner)
        world.error = OSError("no network")
        await asyncio.sleep(50)
        assert len(world.looks) == 4
        assert await route(planner) == "0:3a 3:6b"
        world.error = None
        world.servers = world.servers[1:]
        await asyncio.sleep(20)
        assert await route(planner) == "0:3c 3:6b"

    play(act, refresh_period=15.0)


def test_an_idle_client_hardly_refreshes_until_it_is_used_again(play):
    async def act(world, planner):
        await route(planner)
        await asyncio.sleep(IDLE_TIMEOUT_S + 15)
        looks = len(world.looks)
        await asyncio.sleep(3 * IDLE_REFRESH_PERIOD_S)
        assert looks + 2 <= len(world.looks) <= looks + 3
        await asyncio.sleep(IDLE_REFRESH_PERIOD_S / 2)
        world.servers = world.servers[1:]
        began = now()
        assert await route(planner) == "0:3c 3:6b"
        assert now() == pytest.approx(began + world.look_takes)

    play(act, refresh_period=15.0)


def test_a_slow_refresh_is_not_waited_for_while_there_is_an_old_snapshot(play):
    async def act(world, planner):
        await route(planner)
        await asyncio.sleep(IDLE_TIMEOUT_S + 1000)
        world.look_takes = 100.0
        began = now()
        assert await route(planner) == "0:3a 3:6b"
        assert now() <= began + STALE_REFRESH_TIMEOUT_S

    play(act, refresh_period=15.0)


def test_a_hanging_refresh_is_given_up_and_does_not_delay_the_next(play, caplog):
    async def act(world, planner):
        await route(planner)
        world.look_takes = float("1e9")
        began = now()
        await asyncio.gather(*(planner.refresh() for _ in range(3)))
        assert now() == pytest.approx(began + REFRESH_TIMEOUT_S)
        assert "the servers known before are used" in caplog.text
        assert await route(planner) == "0:3a 3:6b"
        world.look_takes = 0.1
        world.servers = world.servers[1:]
        began = now()
        await planner.refresh()
        assert now() == pytest.approx(began + 0.1)
        assert await route(planner) == "0:3c 3:6b"

    play(act, refresh_period=1000.0)


def test_the_records_of_servers_that_served_this_client_are_kept_first(play):
    async def act(world, planner):
        planner.report_success("a")
        planner.report_success("b")
        planner.report_failure("a", CacheFull("x"))  # no fault of its own
        assert world.dht.served == {"a", "b"}
        planner.report_failure("a", ProtocolViolation("x"))
        assert world.dht.served == {"b"}

    play(act)


def test_missing_blocks_cause_one_refresh(play):
    async def act(world, planner):
        await route(planner)
        await asyncio.sleep(5)
        planner.report_failure("b", PeerLost("x"))
        planner.report_failure("d", PeerLost("x"))
        with pytest.raises(MissingBlocks, match=r"blocks 3:6 .*could not be reached and is avoided") as caught:
            await route(planner)
        assert caught.value.blocks == (3, 4, 5)
        assert len(world.looks) == 2
        with pytest.raises(MissingBlocks):
            await route(planner)
        assert len(world.looks) == 2  # the picture is fresh
        await asyncio.sleep(2)
        world.servers = [*world.servers, server_info(2, 6, "e")]
        assert await route(planner) == "0:3a 3:6e"
        assert len(world.looks) == 3

    play(act, refresh_period=1000.0)


def test_the_error_for_an_unserved_model_names_the_models_that_are_served(play):
    async def act(world, planner):
        world.servers = []
        with pytest.raises(MissingBlocks, match="it serves another\N{REPLACEMENT CHARACTER}"):
            await route(planner)
        world.models = world.models[:1]  # its own servers are just starting
        await asyncio.sleep(5)
        with pytest.raises(MissingBlocks, match="no online server announces them"):
            await route(planner)

    play(act, refresh_period=1000.0)


def test_batches_are_split_by_the_same_snapshot(play):
    async def act(world, planner):
        portions = await planner.split(ALL, [5] * 4)
        assert sorted(row for portion in portions for row in portion.sequences) == [0, 1, 2, 3]
        await asyncio.sleep(5)
        for name in "ac":
            planner.report_failure(name, PeerLost("x"))
        with pytest.raises(MissingBlocks, match="blocks 0:3"):
            await planner.split(ALL, [5])
        assert len(world.looks) == 2
        await asyncio.sleep(2)
        world.servers = [*world.servers, server_info(0, 3, "e")]
        (portion,) = await planner.split(ALL, [5])
        assert portion.route.hops[0].server.peer_id == "e"

    play(act, refresh_period=1000.0)


def test_concurrent_callers_share_one_refresh(play):
    async def act(world, planner):
        await asyncio.gather(*(planner.refresh() for _ in range(5)))
        assert len(world.looks) == 1
        # One that is interrupted does not take it from the others.
        first, second = asyncio.ensure_future(planner.refresh()), asyncio.ensure_future(planner.refresh())
        await asyncio.sleep(0.05)
        first.cancel()
        await second
        assert len(world.looks) == 2

    play(act)


@pytest.mark.parametrize("show", [True, False])
def test_a_route_is_printed_if_asked_for(play, capsys, show):
    async def act(world, planner):
        planner.report_route(await planner.route(ALL, None, None, 1))
        assert capsys.readouterr().out == ("route: 0:3 …a → 3:6 …b\n" if show else "")

    play(act, show_route=show)


def test_a_failure_that_many_sessions_see_is_one_event(play):
    async def act(world, planner):
        for error in (PeerLost("x"), PeerLost("y"), CacheFull("z"), PeerLost("x")):
            planner.report_failure("a", error)
        await asyncio.sleep(PeerFailure.UNREACHABLE.ban_seconds)
        planner.report_failure("a", PeerLost("x"))
        lost, full = PeerFailure.UNREACHABLE, PeerFailure.CACHE_FULL
        assert [(event.reason, event.seconds) for event in world.told] == [
            (lost.value, lost.ban_seconds),
            (full.value, lost.ban_seconds),
            (lost.value, 2 * lost.ban_seconds),
        ]

    play(act)
