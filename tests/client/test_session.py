"""What a session is told before there is any network."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import pytest

from swarm import EarlyExit
from swarm.client.session import InferenceSession
from swarm.data_structures import Span, WireFormat
from swarm.errors import MissingBlocks, UsageError

CONNECTION = SimpleNamespace(config=SimpleNamespace(wire=WireFormat.NONE))
MODEL = SimpleNamespace(remote_blocks=SimpleNamespace(adapter=None), config=SimpleNamespace())


class Chain:
    """A session's servers, of which only matters whether they keep it."""

    is_open = False
    route = "a route"

    def __init__(self, outcomes: list[object]) -> None:
        self._outcomes = outcomes

    async def open(self, prefix: object = None, room_timeout: float | None = None) -> int:
        outcome = self._outcomes.pop(0)
        self.is_open = isinstance(outcome, str)
        if outcome == "too late":
            raise CancelledError
        if isinstance(outcome, Exception):
            raise outcome
        return 0

    async def close(self, keep: int = 0) -> None:
        self.is_open = False


class Connection:
    """Its chains open as `outcomes` say: "open", or an error; "too late" is an interruption when the chain is open."""

    blocks, span, local, is_usable = 4, Span(0, 4), None, True

    def __init__(self, *outcomes: object) -> None:
        self.chains: list[Chain] = []
        self._outcomes = list(outcomes)

    def new_chain(self, *arguments: object) -> Chain:
        self.arguments = arguments
        self.chains.append(Chain(self._outcomes))
        return self.chains[-1]

    def release(self, chain: Chain) -> None:
        self.run(chain.close())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Until its end: nothing in these coroutines waits."""
        try:
            work.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError("it waits")


def test_a_session_needs_room():
    with pytest.raises(ValueError, match="max_length=0"):
        InferenceSession(None, CONNECTION, 0)


def test_what_is_open_when_somebody_interrupts_is_closed():
    connection = Connection("too late")
    session = InferenceSession(MODEL, connection, 8)
    with pytest.raises(CancelledError):
        session.open()
    assert [chain.is_open for chain in connection.chains] == [True]
    session.close()
    assert [chain.is_open for chain in connection.chains] == [False]


def test_who_was_interrupted_or_found_nobody_may_try_again():
    connection = Connection(MissingBlocks((1,)), "too late")
    session = InferenceSession(MODEL, connection, 8)
    with pytest.raises(MissingBlocks):
        session.open()
    assert session.route is None
    with pytest.raises(CancelledError):
        session.open()
    assert session.open() == "a route"  # of the one that was opened in the end
    session.close()
    assert not any(chain.is_open for chain in connection.chains)
    assert session.route is None


def test_servers_are_told_how_tokens_leave_before_anything_is_computed():
    options = EarlyExit(fill="project", verify=False)
    connection = Connection("open", "open", "open")
    plain, session = (InferenceSession(MODEL, connection, 8) for _ in range(2))
    plain.open()
    assert connection.arguments[3] is False
    plain.cache.commit(1, 3, None, None)
    with pytest.raises(UsageError, match="has computed tokens without; pass early_exit to inference_session as well"):
        plain.prepare_for(options)
    plain.prepare_for(EarlyExit())  # needs nothing
    plain.position = 0
    plain.prepare_for(options)
    assert not connection.chains[0].is_open
    plain.open()
    assert connection.arguments[3] is True
    session.prepare_for(options)
    session.open()
    assert connection.arguments[3] is True
    session.cache.commit(1, 3, None, None)
    session.prepare_for(options)
    session.prepare_for(EarlyExit())
    assert [chain.is_open for chain in connection.chains] == [False, True, True]
