"""What a token costs where the network is slow: real servers and a real client, on a clock that only delays move.

With push a step travels from server to server and comes back once: N + 1 one-way delays for N servers. Without it every
server is asked by the client: 2 N. A lane alone keeps every server waiting while its token travels; lanes side by side
fill that time (MDI-LLM, section III-C).
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarm.client.chain.chain import Chain
from swarm.client.config import RequestOptions
from swarm.client.hops.hop_session import SessionContext
from swarm.client.wire.packed_hidden import PackedHidden
from swarm.data_structures import Hop, Route, Span, StepLayout, WireFormat
from swarm.models.checkpoints.checkpoint import open_checkpoint
from swarm.models.execution.span_model import SpanModel
from swarm.models.loading.span_loading import load_span
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor
from swarm.server.compute.engine import Engine
from swarm.server.sessions.handler import MessageHandler
from swarm.server.sessions.session_table import SessionTable
from tests import virtual_time, zoo
from tests.client.fakes import NoRoutes
from tests.infos import server_info
from tests.memory_hub import MemoryHub, MemoryNetwork
from tests.virtual_time import InlineRuntime

DELAY, JUDGED = 0.05, 1.15
CPU = torch.device("cpu")
PROMPT = zoo.PROMPTS[0]
TOKENS = 8


def slow(source: str, target: str) -> float:
    return DELAY


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return zoo.make_checkpoint("llama", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def local(folder) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def whole(folder) -> SpanModel:
    return load_span(open_checkpoint(folder), Span(0, zoo.BLOCKS), dtype=torch.float32, device=CPU)


class FixedRoute(NoRoutes):
    """A planner that knows one route and nothing else."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self.failures: list[str] = []

    async def route(
        self, span: Span, before: str | None, after: str | None, max_length: int, avoid: frozenset[str] = frozenset()
    ) -> Route:
        return self._route

    async def refresh(self) -> None: ...

    def report_failure(self, peer_id: str, error: Exception) -> None:
        self.failures.append(f"{peer_id}: {error}")


class Swarm:
    """`servers` real servers, "server 0" and so on, and one client.

    Attributes:
        sent: how often each pair sent which kind of message.
    """

    def __init__(self, whole: SpanModel, local: Any, servers: int, **options: Any) -> None:
        self.sent: Counter[tuple[str, str, type]] = Counter()
        self.loses: Callable[[str, str, messages.Message], bool] = lambda *message: False
        self.hub = MemoryHub(options.pop("delay", slow), self._watch)
        edges = [round(zoo.BLOCKS * number / servers) for number in range(servers + 1)]
        spans = list(itertools.starmap(Span, itertools.pairwise(edges)))
        self.names = [f"server {number}" for number in range(servers)]
        for name, span in zip(self.names, spans, strict=True):
            self._add(name, whole.narrowed(span))
        hops = tuple(
            Hop(server_info(span.start, span.end, name, throughput=1e4), span)
            for name, span in zip(self.names, spans, strict=True)
        )
        self.planner = FixedRoute(Route(hops))
        manner = RequestOptions("main", WireFormat.NONE, 60.0, **options)
        network = MemoryNetwork(self.hub, "client")
        self.chain = Chain(SessionContext(network, self.planner, manner, Span(0, zoo.BLOCKS), 64))
        self._local = local
        self._length = 0

    def _add(self, name: str, model: SpanModel) -> None:
        loop = asyncio.get_running_loop()
        network, runtime = MemoryNetwork(self.hub, name), InlineRuntime()
        self.hub.handlers[name] = MessageHandler(network, model, "main", SessionTable(1024, loop.time), Engine(runtime))

    def _watch(self, source: str, target: str, message: messages.Message) -> bool:
        self.sent[source, target, type(message)] += 1
        return self.loses(source, target, message)

    @torch.inference_mode()
    async def feed(self, ids: list[int]) -> int:
        """The next token, greedily, after these."""
        hidden_TH = self._local.model.embed_tokens(torch.tensor(ids))
        packed = PackedHidden(
            encode_tensor(hidden_TH, WireFormat.NONE), len(ids), hidden_TH.shape[1], WireFormat.NONE, "float32"
        )
        output = await self.chain.step(packed, StepLayout((self._length,), (len(ids),)))
        self._length += len(ids)
        last_H = decode_tensor(output.payload, len(ids), hidden_TH.shape[1], output.wire, output.dtype, CPU)[-1]
        return int(self._local.lm_head(self._local.model.norm(last_H)).argmax())

    async def generate(self) -> tuple[list[int], list[float]]:
        """Tokens after the prompt, and how long each of them took; the first one's time is the prompt's."""
        loop = asyncio.get_running_loop()
        tokens: list[int] = []
        seconds: list[float] = []
        fed = list(PROMPT)
        for _ in range(TOKENS):
            began = loop.time()
            fed = [await self.feed(fed)]
            tokens += fed
            seconds.append(loop.time() - began)
        return tokens, seconds


def run(swarm: Callable[[], Swarm], scenario: Callable[[Swarm], Awaitable[None]]) -> None:
    async def whole() -> None:
        one = swarm()
        await one.chain.open()
        await scenario(one)
        await one.chain.close()
        await one.hub.close()

    virtual_time.run(whole)


@pytest.fixture(scope="module")
def expected(local) -> list[int]:
    with torch.inference_mode():
        prompt = torch.tensor([PROMPT])
        return local.generate(prompt, max_new_tokens=TOKENS, do_sample=False)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize(("servers", "push"), [(1, True), (3, True), (3, False)])
def test_one_way_delays_of_a_token(whole, local, expected, servers, push):
    async def scenario(swarm):
        tokens, (first, *seconds) = await swarm.generate()
        assert tokens == expected
        ideal = (servers + 1 if push else 2 * servers) * DELAY
        assert seconds == [pytest.approx(ideal, abs=1e-6)] * (TOKENS - 1)
        assert max(seconds) <= JUDGED * ideal
        # The first push also waits for its connection: a round trip beyond the one that brings the prompt.
        assert first <= ideal + (servers - 1) * 2 * DELAY + 1e-6
        assert swarm.planner.failures == []

    run(lambda: Swarm(whole, local, servers, push=push), scenario)


def test_each_step_is_handed_on_once_and_the_client_delivers_only_to_the_first(whole, local):
    async def scenario(swarm):
        await swarm.generate()
        await asyncio.sleep(1)
        for number, name in enumerate(swarm.names):
            delivered = swarm.sent["client", name, messages.StepRequest]
            assert delivered == (TOKENS if number == 0 else 0)
            assert swarm.sent[name, "client", messages.StepReply] == TOKENS
        for one, other in itertools.pairwise(swarm.names):
            assert swarm.sent[one, other, messages.PushRequest] == TOKENS
            assert swarm.sent[other, one, messages.Refusal] == 0

    run(lambda: Swarm(whole, local, 4), scenario)


def test_the_record_of_every_hop_is_complete(whole, local):
    """What is replayed to a server that takes another's place is exactly what the other was sent."""

    async def scenario(swarm):
        tokens, _ = await swarm.generate()
        await asyncio.sleep(1)
        with torch.inference_mode():
            hidden_TH = local.model.embed_tokens(torch.tensor([*PROMPT, *tokens[:-1]]))
        for hop in swarm.chain._hops.hops:
            assert hop.progress.replied == TOKENS - 1
            parts = []
            for layout, packed in hop.history.replay(hop.progress.replied):
                assert layout.starts == (sum(map(len, parts)),)
                parts.append(
                    decode_tensor(packed.payload, packed.tokens, packed.hidden_size, packed.wire, packed.dtype, CPU)
                )
            torch.testing.assert_close(torch.cat(parts), hidden_TH, rtol=1e-4, atol=1e-4)
            hidden_TH = whole.narrowed(hop.hop.span).forward(hidden_TH.unsqueeze(0))[0]

    run(lambda: Swarm(whole, local, 4), scenario)


def test_two_servers_that_cannot_reach_each_other(whole, local, expected):
    """The client delivers what cannot be pushed: one delay more for that hop, and nobody is blamed."""

    async def scenario(swarm):
        tokens, (_, *seconds) = await swarm.generate()
        assert tokens == expected
        assert seconds == [pytest.approx(6 * DELAY)] * (TOKENS - 1)
        assert swarm.sent["client", "server 2", messages.StepRequest] == TOKENS
        assert swarm.sent["client", "server 1", messages.StepRequest] == 0
        assert swarm.planner.failures == []

    def broken() -> Swarm:
        swarm = Swarm(whole, local, 4)
        connect = swarm.hub.connect

        async def partitioned(source, target):
            return await connect(source, "nobody" if (source, target) == ("server 1", "server 2") else target)

        swarm.hub.connect = partitioned
        return swarm

    run(broken, scenario)


def test_a_push_that_is_lost_is_noticed_and_made_up_for(whole, local, expected):
    """The client waits until the answer is late, delivers its own copy, and from the next step on lets them push."""

    async def scenario(swarm):
        pushes = itertools.count()
        swarm.loses = lambda source, target, message: (
            (source, target) == ("server 1", "server 2") and type(message) is messages.PushRequest and next(pushes) == 3
        )
        tokens, seconds = await swarm.generate()
        assert tokens == expected
        assert seconds[1:3] == [pytest.approx(5 * DELAY)] * 2
        assert 6 * DELAY < seconds[3] < 10
        assert seconds[4] < 7 * DELAY  # they hear it at the same time as the step
        assert seconds[5:] == [pytest.approx(5 * DELAY)] * (TOKENS - 5)
        assert swarm.sent["client", "server 2", messages.StepRequest] == 1
        assert swarm.sent["client", "server 1", messages.StepRequest] == 0
        assert swarm.planner.failures == []

    run(lambda: Swarm(whole, local, 4), scenario)


LANE_SERVERS, LANE_TOKENS = 3, 12


async def tokens_a_second(swarm: Swarm, lanes: int) -> float:
    """Of all lanes together, after their prompts."""
    loop = asyncio.get_running_loop()
    sides = []
    for _ in range(lanes):
        side = copy.copy(swarm)
        manner = RequestOptions("main", WireFormat.NONE, 60.0)
        side.chain = Chain(
            SessionContext(MemoryNetwork(swarm.hub, "client"), swarm.planner, manner, Span(0, zoo.BLOCKS), 64)
        )
        await side.chain.open()
        sides.append(side)
    firsts = [await side.feed(list(PROMPT)) for side in sides]
    began = loop.time()

    async def write(side: Swarm, token: int) -> None:
        for _ in range(LANE_TOKENS):
            token = await side.feed([token])

    await asyncio.gather(*(write(side, token) for side, token in zip(sides, firsts, strict=True)))
    seconds = loop.time() - began
    for side in sides:
        await side.chain.close()
    return lanes * LANE_TOKENS / seconds


@pytest.mark.parametrize(("lanes", "judged"), [(3, 2.8), (6, 5.4)])
def test_lanes_use_the_time_in_which_others_travel(whole: SpanModel, local: Any, lanes: int, judged: float) -> None:
    async def scenario(swarm: Swarm) -> None:
        one = await tokens_a_second(swarm, 1)
        assert one == pytest.approx(1 / ((LANE_SERVERS + 1) * DELAY))
        assert await tokens_a_second(swarm, lanes) >= judged * one
        assert swarm.planner.failures == []

    run(lambda: Swarm(whole, local, LANE_SERVERS), scenario)
