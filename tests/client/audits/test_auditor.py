"""Audits in memory, by real handlers: liars are found, whatever they lie about, and the honest never."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swarm.client.audits.auditor import CLOSE_TIMEOUT_S, Auditor
from swarm.client.routes.events import Audited
from swarm.protocol import messages
from swarm.routing.suspicion import STRANGER
from swarm.trust.opinion_file import OpinionFile, read_opinions
from tests import virtual_time
from tests.client.chains import Conversation, Swarm, Tamper

THRICE = {name + suffix: span for suffix in ("", "2", "3") for name, span in {"a": (0, 3), "b": (3, 6)}.items()}


class Audits:
    """A swarm whose client audits everything."""

    def __init__(
        self,
        model: Any,
        servers: dict[str, tuple[int, int]] = THRICE,
        seed: int = 0,
        file: OpinionFile | None = None,
    ) -> None:
        self.swarm = Swarm(model, servers)
        self.events: list[Audited] = []
        self.suspicions = self.swarm.planner.router.suspicions
        self.auditor = Auditor(
            lambda: self.swarm.planner.router.usable(time.monotonic()),
            self.suspicions,
            1.0,
            file,
            self.note,
            random.Random(seed),
        )

    def note(self, event: Any) -> None:
        self.events.append(event)

    async def talk(self) -> Conversation:
        talk = await self.swarm.chain()
        talk.chain._context = replace(talk.chain._context, samples=self.auditor)
        talk.chain._hops._context = talk.chain._context
        return talk

    async def session(self, steps: int = 12, check: bool = True) -> None:
        """One session, and the audits of it."""
        talk = await self.talk()
        if not check:
            talk.check = lambda *_: None  # type: ignore[method-assign]
        await talk.prefill((6, 3), (4, 4))
        for _ in range(steps):
            await talk.append(1, 1)
        await talk.chain.close()
        if self.auditor._task is not None:
            await self.auditor._task

    def failures(self, name: str) -> int:
        """Audits that spoke against a server."""
        return self.suspicions.of(name, time.monotonic()).differed

    def log_odds(self, name: str) -> float:
        return self.suspicions.of(name, time.monotonic()).log_odds


def run(model: Any, scenario: Callable[[Audits], Any], **options: Any) -> None:
    async def whole() -> None:
        audits = Audits(model, **options)
        await audits.swarm.start()
        await scenario(audits)
        await audits.auditor.close()

    virtual_time.run(whole, limit=1e4)


def test_honest_servers_gain_trust(span_model):
    async def scenario(audits: Audits) -> None:
        for _ in range(3):
            await audits.session()
        assert audits.events
        assert all(event.agreed for event in audits.events)
        assert audits.log_odds("a") < STRANGER
        assert audits.log_odds("b") < STRANGER

    run(span_model, scenario)


def lie(applies: Callable[[messages.StepReply | messages.PushRequest], bool], factor: float = 1.5) -> Tamper:
    """Outputs that are a little too large, wherever they go."""

    def tamper(message: messages.Message, payload: Any) -> Any:
        is_output = isinstance(message, messages.StepReply | messages.PushRequest)
        if is_output and applies(message):
            payload = (np.frombuffer(payload, np.float32) * np.float32(factor)).tobytes()
        return message, payload

    return tamper


def number(message: Any) -> int:
    return message.step.step if isinstance(message, messages.PushRequest) else message.step


LIES = {
    "one of all steps": lambda message: number(message) == 7,
    "always": lambda message: True,
    "only in decode": lambda message: number(message) >= 2,
}


@pytest.mark.parametrize("kind", LIES)
@pytest.mark.parametrize("name", ["a", "b"])
def test_liars_are_found(span_model, kind, name):
    """The first server of the route lies, or the last one: only the liar is blamed, and it is not used any more."""

    async def scenario(audits: Audits) -> None:
        audits.swarm.servers[name].tamper = lie(LIES[kind])
        await audits.session(check=False)
        assert audits.log_odds(name) > 0
        for _ in range(2):
            await audits.session()
        others = [one for one in THRICE if one != name]
        assert not any(audits.failures(one) for one in others)
        assert all(f"@{name} " not in f"{route} " for route in audits.swarm.planner.routes[1:])

    run(span_model, scenario)


def test_a_witness_that_lies_is_found_itself(span_model):
    """It frames whoever it is asked about, until others have been asked as well."""

    async def scenario(audits: Audits) -> None:
        audits.swarm.servers["a2"].tamper = lie(lambda message: True)
        for _ in range(6):
            await audits.session()
        assert audits.log_odds("a2") > 0
        assert not any(audits.failures(one) for one in THRICE if one != "a2")

    run(span_model, scenario)


def test_two_servers_that_differ_prove_nothing(span_model):
    async def scenario(audits: Audits) -> None:
        audits.swarm.servers["a"].tamper = lie(lambda message: True)
        await audits.session(check=False)
        assert not audits.failures("a") + audits.failures("a2")
        assert audits.log_odds("b") < STRANGER

    run(span_model, scenario, servers={"a": (0, 3), "a2": (0, 3), "b": (3, 6), "b2": (3, 6)})


def test_only_servers_of_the_same_precision_are_asked(span_model):
    async def scenario(audits: Audits) -> None:
        for name in ("a2", "a3"):
            audits.swarm.announced[name] = replace(audits.swarm.announced[name], compute_dtype="bfloat16")
        await audits.session()
        assert {event.peer_id[0] for event in audits.events} == {"b"}

    run(span_model, scenario)


def test_a_server_answers_for_its_own_tokens_only(span_model):
    """A liar is killed in the middle of a session: its successor is not blamed for what it gave."""

    async def scenario(audits: Audits) -> None:
        audits.swarm.servers["a"].tamper = lie(lambda message: True)
        talk = await audits.talk()
        talk.check = lambda *_: None  # type: ignore[method-assign]
        await talk.prefill((6, 3), (4, 4))
        audits.swarm.kill("a")
        for _ in range(6):
            await talk.append(1, 1)
        await talk.chain.close()
        assert audits.auditor._task is not None
        await audits.auditor._task
        assert all(event.agreed for event in audits.events if event.peer_id != "a")
        assert any(event.peer_id[0] == "a" for event in audits.events)
        assert not any(audits.failures(one) for one in THRICE if one != "a")

    run(span_model, scenario)


def test_witnesses_that_fail_are_left_out(span_model):
    async def scenario(audits: Audits) -> None:
        talk = await audits.talk()
        await talk.append(6, 3)
        audits.swarm.kill("a2")
        audits.swarm.hub.hang("b2")
        await talk.chain.close()
        assert audits.auditor._task is not None
        await audits.auditor._task
        assert {event.peer_id for event in audits.events} == {"a", "a3", "b", "b3"}
        assert all(event.agreed for event in audits.events)

    run(span_model, scenario, seed=3)


def test_a_fast_server_that_fails_does_not_keep_slow_ones_from_being_known(span_model):
    """Nothing is ever known of it, so it would always be the first of the new ones."""

    async def scenario(audits: Audits) -> None:
        audits.swarm.kill("a2")
        for _ in range(8):
            await audits.session()
        assert {"a", "a3", "a4"} <= {event.peer_id for event in audits.events}

    run(span_model, scenario, servers={**THRICE, "a4": (0, 3)})


def test_a_client_that_ends_finishes_its_audits_if_it_keeps_what_it_learns(span_model, tmp_path):
    """And gives up in time if a witness hangs."""
    path = tmp_path / "opinions.json"

    async def scenario(audits: Audits) -> None:
        talk = await audits.talk()
        await talk.append(6, 3)
        await talk.chain.close()
        before = time.monotonic()
        await audits.auditor.close()
        assert time.monotonic() - before <= CLOSE_TIMEOUT_S + 1

    run(span_model, scenario, file=OpinionFile(path))
    known = read_opinions(path)
    assert {peer[0] for peer in known} == {"a", "b"}
    assert all(one.agreed == 1 for one in known.values())

    async def hanging(audits: Audits) -> None:
        for name in ("a2", "a3", "b2", "b3"):
            audits.swarm.hub.hang(name)
        await scenario(audits)
        assert not audits.events

    run(span_model, hanging, file=OpinionFile(tmp_path / "other.json"))
    assert not (tmp_path / "other.json").exists()


def test_samples_do_not_pile_up(span_model):
    async def scenario(audits: Audits) -> None:
        talks = [await audits.talk() for _ in range(6)]
        for talk in talks:
            await talk.append(4)
        for talk in talks:
            await talk.chain.close()
        assert len(audits.auditor._waiting) <= 4
        assert audits.auditor._task is not None
        await audits.auditor._task
        assert audits.auditor.tokens > 0

    run(span_model, scenario)


def test_nothing_is_audited_unless_it_is_wanted(span_model):
    async def scenario(audits: Audits) -> None:
        audits.auditor._rate = 0.0
        await audits.session()
        assert not audits.events
        assert audits.auditor._task is None

    run(span_model, scenario)
