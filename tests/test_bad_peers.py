"""Bad peers among good ones, over real processes and a real DHT: every client's text is right, and nobody is harmed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hivemind.utils.crypto import RSAPrivateKey

from swarm.client.routes.events import HopLost, SessionEvent
from swarm.client.session import InferenceSession
from swarm.data_structures import ServerInfo, ServerState, Span
from swarm.errors import PeerTimeout
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.protocol import messages
from swarm.routing.peer_health import PeerFailure, PeerHealth
from swarm.server.sessions.push_link import MIN_BYTES_PER_S, PUSH_TIMEOUT_S
from tests import bad_peers
from tests.bad_peers import (
    Forger,
    GreedyClient,
    Lie,
    Stored,
    is_output,
    is_push,
    is_reply,
    run_forger,
    run_peer,
    start_bad_server,
)
from tests.disturbances import demo_prompt, demo_text, holder, write
from tests.slow import slow_except
from tests.swarms import ServerProcess, TestSwarm, run_client, run_swarm
from tests.waiting import wait_until

BLOCKS = 12
SPANS = ("0:4", "4:8", "8:12")
NEW = 24

# The forger's connections to its own daemon are left to the garbage collector by hivemind.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return demo_prompt()


@pytest.fixture(scope="module")
def expected(prompt: torch.Tensor) -> list[int]:
    return demo_text(prompt, NEW)


@pytest.fixture(scope="module")
def swarm() -> Iterator[TestSwarm]:
    """One good server for each span; all tests share them, so that none of the bad peers may harm them.

    They say that they are slow, so that a bad server is everybody's first choice.
    """
    with run_swarm(DEMO_FOLDER, SPANS, dtype="float32", throughput=40.0) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def bystander(swarm: TestSwarm) -> Iterator[Any]:
    """Another client, which the bad peers do not get to see."""
    good = [server.peer_id for server in swarm.working()]
    with run_client(swarm, dtype="float32", allowed_servers=good) as model:
        yield model


def health(model: Any) -> PeerHealth:
    return model.swarm._planner.router.health  # type: ignore[no-any-return]


def banned(model: Any) -> frozenset[str]:
    return health(model).banned_peers(time.monotonic())


def misbehave(
    swarm: TestSwarm,
    bystander: Any,
    bad: ServerProcess,
    block: int,
    prompt: torch.Tensor,
    expected: list[int],
    *,
    answers: bool = True,
) -> set[PeerFailure]:
    """A client writes over a bad server, which is its first choice for the block, while another one writes without it.
    What the client then holds against the bad server.

    Args:
        answers: whether the bad server answers at all. A client that left it because another one was quicker has not
            judged its answers; then a new client writes.
    """
    good = {server.peer_id for server in swarm.working()} - {bad.peer_id}
    reasons: set[PeerFailure] = set()

    def has_judged() -> bool:
        texts: list[list[int]] = []
        other = threading.Thread(target=lambda: texts.append(write(bystander, prompt, NEW)))
        used: list[str] = []
        events: list[SessionEvent] = []

        def look(session: InferenceSession) -> None:
            used.append(holder(swarm, session, block).peer_id)
            assert used[-1] not in banned(model)  # who has failed is avoided from the beginning

        def begin(session: InferenceSession) -> None:
            look(session)
            other.start()

        with run_client(swarm, dtype="float32") as model:
            model.swarm.add_listener(events.append)
            began = time.monotonic()
            assert write(model, prompt, NEW, {1: begin}) == expected
            reasons.update(health(model).reasons(bad.peer_id))
            assert health(model).banned_peers(began) == ({bad.peer_id} if reasons else set())
            lost = [event for event in events if isinstance(event, HopLost) and event.peer_id == bad.peer_id]
            assert write(model, prompt, NEW, {1: look}) == expected
            other.join()
            assert texts == [expected]
            assert used[0] == bad.peer_id
            assert not banned(model) & good
            assert not banned(bystander)
        if answers and lost and lost[0].reason == PeerTimeout.code:
            reasons.clear()
            return False
        return True

    try:
        wait_until(has_judged)
    finally:
        bad.stop()
        assert {server.peer_id for server in swarm.working()} == good
    return reasons


@pytest.mark.parametrize(
    ("block", "lie", "applies", "reason"),
    slow_except(
        [
            # Perhaps what came in was such that any server would have made NaN of it.
            (4, bad_peers.nan, is_reply, PeerFailure.SUSPECTED),
            (8, bad_peers.half, is_reply, PeerFailure.WRONG_ANSWER),
            (4, bad_peers.ten_megabytes, is_reply, PeerFailure.WRONG_ANSWER),
            (4, bad_peers.nothing, is_output, PeerFailure.TIMED_OUT),
        ],
        (4, bad_peers.nan, is_reply, PeerFailure.SUSPECTED),
        (4, bad_peers.nothing, is_output, PeerFailure.TIMED_OUT),
        unpack=True,
    ),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_server_that_lies(
    swarm: TestSwarm,
    bystander: Any,
    prompt: torch.Tensor,
    expected: list[int],
    block: int,
    lie: Lie,
    applies: Callable[[messages.Message], bool],
    reason: PeerFailure,
) -> None:
    bad = start_bad_server(swarm, f"{block}:{block + 4}", lie, applies)
    answers = lie is not bad_peers.nothing
    reasons = misbehave(swarm, bystander, bad, block, prompt, expected, answers=answers)
    # Others are asked before its time is over. If the text ends before, it was only slow.
    assert reasons == {reason} or (not answers and not reasons)


@pytest.mark.parametrize(
    "lie",
    slow_except(
        [bad_peers.one_infinity, bad_peers.wrong_step, bad_peers.unknown_format],
        bad_peers.wrong_step,
    ),
)
def test_a_server_whose_answers_are_no_answers(
    swarm: TestSwarm, bystander: Any, prompt: torch.Tensor, expected: list[int], lie: Lie
) -> None:
    bad = start_bad_server(swarm, "4:8", lie)
    reason = PeerFailure.SUSPECTED if lie is bad_peers.one_infinity else PeerFailure.WRONG_ANSWER
    assert misbehave(swarm, bystander, bad, 4, prompt, expected) == {reason}


@pytest.mark.parametrize("lie", slow_except([bad_peers.nan, bad_peers.ten_megabytes, bad_peers.nothing], bad_peers.nan))
def test_a_server_that_pushes_something_else_than_it_answers(
    swarm: TestSwarm, bystander: Any, prompt: torch.Tensor, expected: list[int], lie: Lie
) -> None:
    bad = start_bad_server(swarm, "4:8", lie, is_push)
    # Which of the two servers at both ends of a push is at fault cannot be known, so nobody is blamed.
    assert misbehave(swarm, bystander, bad, 4, prompt, expected) == set()


Forgery = Callable[[Forger, ServerInfo], Stored]
"""From an honest server's announcement to a forged one."""


def like(**changes: Any) -> Forgery:
    """The forger's own announcement, rightly signed; it would be believed but for the changes."""
    return lambda forger, honest: forger.own(forger.info(honest, **changes))


STRANGER = RSAPrivateKey()

FORGERIES: dict[str, Forgery] = {
    "a span that ends outside the model": like(span=Span(4, BLOCKS + 1), digests=("0123456789ab",) * 9),
    "a span far outside the model": like(span=Span(2000, 2004)),
    "a span beyond all models": like(span=Span(1 << 40, (1 << 40) + 4)),
    "a span under another block's key": like(span=Span(5, 9)),
    "too few digests": like(digests=("0123456789ab",)),
    "digests of other weights": like(digests=("0123456789ab",) * 4),
    "negative throughput": like(throughput=-1.0),
    "infinite throughput": like(throughput=math.inf),
    "throughput that is no number": like(throughput=math.nan),
    "no throughput": like(throughput=0.0),
    "infinite network throughput": like(network_throughput=math.inf),
    "a negative queue": like(queue_delay=-5.0),
    "garbage": lambda forger, honest: Stored(b"\x93garbage" * 10, forger.key, forger.key),
    "no signature": lambda forger, honest: Stored(forger.own(forger.info(honest)).value, forger.key, None),
    "no owner": lambda forger, honest: Stored(forger.own(forger.info(honest)).value, None, None),
    "another peer's signature": lambda forger, honest: Stored(
        forger.own(forger.info(honest)).value, forger.key, STRANGER
    ),
    "another peer's name": lambda forger, honest: forger.own(replace(honest, throughput=bad_peers.ATTRACTIVE)),
    "another peer's farewell": lambda forger, honest: forger.own(replace(honest, state=ServerState.OFFLINE)),
    "expired long ago": lambda forger, honest: replace(forger.own(forger.info(honest)), lifetime=-60.0),
    "valid for years": lambda forger, honest: replace(forger.own(forger.info(honest)), lifetime=1e8),
}
BELIEVED_BY_NODES = {"a span that ends outside the model", "digests of other weights"}
"""What only who knows the model can see through."""


@pytest.fixture(scope="module")
def forger(swarm: TestSwarm) -> Iterator[Forger]:
    with run_forger(swarm) as forger:
        yield forger


def test_forged_announcements(
    swarm: TestSwarm, bystander: Any, forger: Forger, prompt: torch.Tensor, expected: list[int]
) -> None:
    good = [server.peer_id for server in swarm.working()]
    [honest] = [info for info in bystander.swarm.servers() if info.span == Span(4, 8)]
    with run_client(swarm, dtype="float32") as model:
        for kind, forge in FORGERIES.items():
            taken = forger.store(DEMO_FOLDER.name, 4, forge(forger, honest), good)
            assert taken == [kind in BELIEVED_BY_NODES] * len(good), kind
            assert sorted(info.peer_id for info in model.swarm.servers()) == sorted(good), kind
        assert write(model, prompt, NEW) == expected
        assert not banned(model)  # nobody was even tried
    assert write(bystander, prompt, NEW) == expected
    assert not banned(bystander)


def test_a_well_formed_announcement_of_a_peer_that_serves_nothing(
    swarm: TestSwarm, bystander: Any, forger: Forger, prompt: torch.Tensor, expected: list[int]
) -> None:
    """The forger's records are tried where nothing is wrong with them: the other tests would notice if they were."""
    [honest] = [info for info in bystander.swarm.servers() if info.span == Span(4, 8)]
    good = [server.peer_id for server in swarm.working()]
    stored = replace(forger.own(forger.info(honest)), lifetime=60.0)
    assert all(forger.store(DEMO_FOLDER.name, 4, stored, good))
    began = time.monotonic()
    with run_client(swarm, dtype="float32") as model:
        assert write(model, prompt, NEW) == expected
        assert health(model).banned_peers(began) == {forger.peer_id}
        assert health(model).reasons(forger.peer_id) == (PeerFailure.UNREACHABLE,)


def server_of(bystander: Any, server: ServerProcess) -> ServerInfo:
    """What a server announces."""
    [info] = [info for info in bystander.swarm.servers() if info.peer_id == server.peer_id]
    return info


TOKENS, WARM_UP, REQUESTS, STREAMS = 400, 10, 60, 6


@pytest.mark.slow
def test_a_client_that_never_reads(swarm: TestSwarm, bystander: Any, prompt: torch.Tensor, expected: list[int]) -> None:
    """Its streams stand still and are given up in the end; what it is owed stays small, and the server can leave."""
    server = swarm.start("4:8", dtype="float32", throughput=40.0).wait_ready()
    try:
        hidden = np.zeros((TOKENS, bystander.config.hidden_size), dtype=np.float32)
        with run_client(swarm, dtype="float32") as model, run_peer(swarm) as (peer, background):
            info = server_of(model, server)
            # What the server takes for its first answers it keeps, whoever reads them.
            GreedyClient(peer, background, info).ask(STREAMS, WARM_UP, hidden, reads=True)
            client = GreedyClient(peer, background, info)
            memory = psutil.Process(server.pid).memory_info().rss
            taken = client.ask(STREAMS, REQUESTS, hidden)
            assert taken < STREAMS * REQUESTS
            # More is asked for than may be kept: answers of 100 MB.
            assert psutil.Process(server.pid).memory_info().rss < memory + STREAMS * REQUESTS * hidden.nbytes / 2
            deadline = time.monotonic() + PUSH_TIMEOUT_S + hidden.nbytes / MIN_BYTES_PER_S
            while time.monotonic() < deadline:
                assert write(bystander, prompt, NEW) == expected
            assert all(count < REQUESTS for count in client.answers())
            client.ask(STREAMS, REQUESTS, hidden)
            server.stop()  # which it does in order, though some answers are unsent
        assert write(bystander, prompt, NEW) == expected
    finally:
        if server.works:
            server.stop()
