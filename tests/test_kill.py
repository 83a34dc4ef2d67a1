"""Servers die, hang and come back while a text is written, over real processes: the text stays what it would have been.

With SWARM_SOAK=1 a server is killed before every single token; otherwise before some.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from swarm import EarlyExit
from swarm.client.chain.late import Standbys
from swarm.client.hops.hop_session import HopSession
from swarm.client.session import InferenceSession
from swarm.errors import MissingBlocks
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from tests.disturbances import Before, Event, demo_prompt, demo_text, dripping, greedy, holder, write
from tests.slow import slow_except
from tests.swarms import ServerProcess, TestSwarm, run_client, run_swarm
from tests.waiting import wait_until

SPANS = ("0:4", "4:8", "8:12")
BLOCKS = (0, 4, 8)
"""One block of each span."""

NEW = 64
LONG = os.environ.get("SWARM_SOAK") == "1"


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return demo_prompt()


@pytest.fixture(scope="module")
def expected(prompt: torch.Tensor) -> list[int]:
    """The undisturbed text."""
    return demo_text(prompt, NEW)


@pytest.fixture(scope="module")
def shared() -> Iterator[TestSwarm]:
    """Each span twice."""
    with run_swarm(DEMO_FOLDER, SPANS * 2, dtype="float32") as swarm:
        yield swarm


@pytest.fixture(scope="module")
def client(shared: TestSwarm) -> Iterator[Any]:
    with run_client(shared, dtype="float32", show_route=True) as model:
        yield model


@pytest.fixture
def swarm(shared: TestSwarm) -> TestSwarm:
    """Each span twice, whatever happened before: starting all six for every test would take most of its time."""
    for server in shared.servers:
        server.thaw()
    fresh = [shared.start(blocks, dtype="float32") for blocks in SPANS for _ in range(2 - len(shared.holders(blocks)))]
    for server in fresh:
        server.wait_ready()
    return shared


@pytest.fixture
def model(swarm: TestSwarm, client: Any) -> Any:
    """A client that knows the servers of now."""
    client.swarm.servers()
    return client


def kill(swarm: TestSwarm, *blocks: int) -> Event:
    """An event: those that compute these blocks for the session are killed, all at once."""

    def happen(session: InferenceSession) -> None:
        for server in [holder(swarm, session, block) for block in blocks]:
            server.kill()

    return happen


def kill_all(swarm: TestSwarm, blocks: str) -> Event:
    """An event: every server that was started for just these blocks is killed."""

    def happen(session: InferenceSession) -> None:
        for server in swarm.holders(blocks):
            server.kill()

    return happen


class Written(BaseStreamer):
    """Token ids as they come."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


@contextmanager
def replaced(swarm: TestSwarm, blocks: str, when: Callable[[], object] = lambda: True) -> Iterator[None]:
    """Another server for the blocks starts as soon as `when` says so, and serves when the body is left."""
    started: list[ServerProcess] = []
    left = threading.Event()

    def start() -> None:
        wait_until(lambda: when() or left.is_set())
        if when():
            started.append(swarm.start(blocks, dtype="float32").wait_ready())

    thread = threading.Thread(target=start)
    thread.start()
    try:
        yield
    finally:
        left.set()
        thread.join()
    assert started


@contextmanager
def in_step(number: int, event: Event, blocks: tuple[int, ...] = BLOCKS) -> Iterator[Event]:
    """An event happens when steps have been handed on `number` times in front of these blocks, as far as the client
    knows: the first server has been sent one, or the server before has answered one.

    Yields the event with which counting begins.
    """
    sessions: list[InferenceSession] = []
    seen = itertools.count(1)
    deliver, on_reply = HopSession.deliver, HopSession._on_step_reply

    def count(block: int) -> None:
        if sessions and block in blocks and next(seen) == number:
            event(sessions[0])

    async def deliver_and_count(self: HopSession, *args: Any) -> None:
        await deliver(self, *args)
        count(self.hop.span.start)

    def receive_and_count(self: HopSession, *args: Any) -> bool:
        is_answer = on_reply(self, *args)
        count(self.hop.span.end)
        return is_answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HopSession, "deliver", deliver_and_count)
        patch.setattr(HopSession, "_on_step_reply", receive_and_count)
        yield sessions.append
    assert next(seen) > number


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other server is asked beside one that is late, so routes change only where one is killed."""
    monkeypatch.setattr(Standbys, "_ask", lambda *args: None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_server_dies_before_every_tenth_token_while_tokens_leave_early(swarm, model, prompt, expected):
    def kill_and_replace(block: int) -> Event:
        def happen(session: InferenceSession) -> None:
            kill(swarm, block)(session)
            spans = SPANS[BLOCKS.index(block)]
            if len(swarm.holders(spans)) < 2:
                swarm.start(spans, dtype="float32").wait_ready()

        return happen

    events = {token: kill_and_replace(BLOCKS[token // 10 % 3]) for token in range(10, NEW, 10)}
    assert write(model, prompt, NEW, events, early_exit=EarlyExit(threshold=0.2)) == expected


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("blocks", "block", "tokens"),
    slow_except([("0:4", 0, (1, 33)), ("4:8", 4, (2, NEW)), ("8:12", 8, (1, NEW))], ("4:8", 4, (2, NEW)), unpack=True),
    ids=SPANS,
)
def test_a_server_is_killed_before_a_token(
    swarm: TestSwarm, model: Any, prompt: torch.Tensor, expected: list[int], blocks: str, block: int, tokens: tuple[int]
) -> None:
    assert write(model, prompt, NEW) == expected  # the undisturbed run
    for token in range(1, NEW + 1) if LONG else tokens:
        with replaced(swarm, blocks):
            assert write(model, prompt, NEW, {token: kill(swarm, block)}) == expected, f"killed before token {token}"


def test_several_servers_are_killed_at_once(
    swarm: TestSwarm, model: Any, prompt: torch.Tensor, expected: list[int]
) -> None:
    assert write(model, prompt, NEW, {20: kill(swarm, 4, 8)}) == expected


@pytest.mark.slow
def test_a_server_is_killed_during_the_prefill(swarm: TestSwarm, model: Any) -> None:
    """It is hung first, so that the kill surely falls between the prefill's request and its answer."""
    block = 4
    prompt = demo_prompt("Once upon a time there was a little dog who wanted to see the sea. " * 12)

    with in_step(1, kill(swarm, block), (block,)) as begin:

        def hang(session: InferenceSession) -> None:
            begin(session)
            holder(swarm, session, block).freeze()

        assert write(model, prompt, 8, {1: hang}) == demo_text(prompt, 8)


@pytest.mark.slow
def test_servers_hang(swarm: TestSwarm, prompt: torch.Tensor, expected: list[int]) -> None:
    """Each span's server hangs once, for some time, and goes on where it was when nobody needs it any more."""
    hung: list[ServerProcess] = []

    def hang(block: int, daemon: bool = False) -> Event:
        def happen(session: InferenceSession) -> None:
            for server in hung:
                server.thaw()
            hung.append(holder(swarm, session, block))
            hung[-1].freeze(daemon)

        return happen

    with run_client(swarm, dtype="float32", show_route=True) as model:
        # The second time the whole machine hangs, not just the process.
        assert write(model, prompt, NEW, {10: hang(4), 25: hang(0, daemon=True), 40: hang(8)}) == expected
        assert len({server.peer_id for server in hung}) == 3
        hung[-1].thaw()
        assert write(model, prompt, NEW) == expected


@pytest.mark.slow
def test_a_server_that_delays_every_reply_is_replaced(
    swarm: TestSwarm, prompt: torch.Tensor, expected: list[int]
) -> None:
    """It answers each step after a second: in time, but any other one that holds its blocks is quicker."""
    block = 4
    dripped: list[ServerProcess] = []
    routes: list[set[str]] = []

    with ExitStack() as stack, run_client(swarm, dtype="float32") as model:

        def drip(session: InferenceSession) -> None:
            dripped.append(holder(swarm, session, block))
            stack.enter_context(dripping(dripped[0], 1.0))

        def look(session: InferenceSession) -> None:
            assert session.route is not None
            routes.append({hop.server.peer_id for hop in session.route.hops})

        looks: dict[int, Event] = dict.fromkeys(range(16, NEW + 1), look)
        assert write(model, prompt, NEW, {15: drip, **looks}) == expected
    (victim,) = dripped
    assert sum(victim.peer_id in route for route in routes) < len(routes) / 2


@pytest.mark.slow
def test_a_session_waits_for_blocks_that_nobody_holds(
    swarm: TestSwarm, model: Any, prompt: torch.Tensor, expected: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "swarm.client")

    def complaints() -> list[str]:
        return [record.getMessage() for record in caplog.records if "missing" in record.getMessage()]

    with replaced(swarm, "4:8", when=complaints):
        assert write(model, prompt, NEW, {20: kill_all(swarm, "4:8")}) == expected
    [said] = complaints()
    assert "blocks 4:8 are missing" in said
    assert "Waiting up to 60 s" in said


@pytest.mark.slow
def test_a_session_is_resumed_when_servers_return(swarm: TestSwarm, prompt: torch.Tensor, expected: list[int]) -> None:
    written = Written()
    # Servers that other tests killed are still announced, some with other spans: their blocks would not seem to miss.
    killed = [server.peer_id for server in swarm.servers if server.peer_id and not server.works]
    with (
        run_client(swarm, dtype="float32", wait_for_blocks=1.5, blocked_servers=killed) as model,
        model.inference_session(max_length=prompt.shape[1] + NEW) as session,
    ):
        events = {20: kill_all(swarm, "4:8")}
        with pytest.raises(MissingBlocks) as missing:
            greedy(
                model, prompt, NEW, streamer=written, stopping_criteria=StoppingCriteriaList([Before(session, events)])
            )
        assert missing.value.blocks == (4, 5, 6, 7)
        assert "swarm server --blocks 4:8" in str(missing.value)
        assert written.tokens[prompt.shape[1] :] == expected[:19]
        with pytest.raises(MissingBlocks, match="blocks 4:8 are missing"):
            session.resume()
        newcomer = swarm.start("4:8", dtype="float32").wait_ready()
        assert newcomer.peer_id in {hop.server.peer_id for hop in session.resume().hops}
        assert session.position == len(written.tokens) - 1
        assert greedy(model, torch.tensor([written.tokens]), NEW - 19) == expected[19:]


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_the_replacement_is_cut_differently(swarm: TestSwarm, prompt: torch.Tensor, expected: list[int]) -> None:
    # Too slow to be anybody's first choice.
    others = [swarm.start(blocks, dtype="float32", throughput=1.0) for blocks in ("0:6", "6:12")]
    first, second = (server.wait_ready().peer_id for server in others)
    allowed = [first, second, *(swarm.holders(blocks)[0].peer_id for blocks in SPANS)]
    routes: list[list[tuple[str, str]]] = []

    def note(session: InferenceSession) -> None:
        assert session.route is not None
        routes.append([(str(hop.span), hop.server.peer_id) for hop in session.route.hops])

    with run_client(swarm, dtype="float32", allowed_servers=allowed, show_route=True) as model:
        events = {10: kill(swarm, 4), 20: note, 21: kill(swarm, 8), 31: kill(swarm, 0), 41: note}
        assert write(model, prompt, NEW, events) == expected
    assert routes[0][1:-1] == [("4:6", first), ("6:8", second)]
    assert routes[1] == [("0:4", first), ("4:6", first), ("6:8", second), ("8:12", second)]
    for server in others:
        server.kill()


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_the_replacement_is_killed_during_the_replay(
    swarm: TestSwarm, model: Any, prompt: torch.Tensor, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm.start("4:8", dtype="float32").wait_ready()
    replay = HopSession.replay
    killed: list[str] = []

    async def fatal(self: HopSession, *args: Any, **kwargs: Any) -> Any:
        if not killed:
            killed.append(self.peer_id)
            swarm.server(self.peer_id).kill()
        return await replay(self, *args, **kwargs)

    monkeypatch.setattr(HopSession, "replay", fatal)
    assert write(model, prompt, NEW, {40: kill(swarm, 4)}) == expected
    assert len(killed) == 1
