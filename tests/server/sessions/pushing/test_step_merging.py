"""Steps that are computed as one give what they give one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import WireFormat
from swarm.errors import RemoteError
from swarm.metrics.server import ServerObserver
from swarm.models.execution.session_cache import SessionCache
from swarm.models.execution.span_model import SpanModel
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor
from swarm.server.compute.compute_request import ComputeResult, ForwardWork
from swarm.server.compute.scheduler import MAX_SHORT_TOKENS
from swarm.server.sessions.pushing.step_merging import MAX_MERGED_TOKENS, MergedSteps, is_urgent, mergeable
from swarm.server.sessions.request_validation import RequestLimits, RequestValidator
from swarm.server.sessions.session import Session, SessionTerms
from swarm.server.sessions.session_steps import SessionSteps
from swarm.server.sessions.session_table import SessionTable
from tests.server.conversations import CPU, HIDDEN, REVISION, SPAN, changed, make_model

POISON = 7.0
"""An input that begins with this number cannot be computed here."""

MAX_LENGTH = 12
Pushed = tuple[messages.StepRequest, bytes]
Outcome = tuple[str, messages.StepReply | None, torch.Tensor | None]
"""What came of a step: a word or the code of its refusal, its reply and outputs."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> SpanModel:
    return make_model(tmp_path_factory.mktemp("checkpoint"))


def step(number: int = 5, starts: Any = (9,), counts: Any = (1,), epoch: int = 3, **more: Any) -> messages.StepRequest:
    return messages.StepRequest(number, [*starts], [*counts], WireFormat.NONE, "float32", epoch=epoch, **more)


def test_tokens_of_a_text_are_merged_up_to_a_short_request():
    steps = [step(number, [number]) for number in range(40)]
    steps = [changed(one, epoch=0) for one in steps]
    assert mergeable(steps[:1]) == 1
    assert mergeable(steps) == MAX_SHORT_TOKENS
    batch = [step(number, [number] * 12, [1] * 12, 0) for number in range(40)]
    assert mergeable(batch) == MAX_MERGED_TOKENS // 12


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"step": 7}, id="a step between is missing"),
        pytest.param({"epoch": 6}, id="another epoch"),
        pytest.param({"follows": 5}, id="begins an epoch"),
        pytest.param({"starts": [9, 4]}, id="not where the one before ends"),
        pytest.param({"starts": [10, 4, 0], "counts": [1, 1, 1]}, id="one more sequence"),
        pytest.param({"starts": [10]}, id="lists disagree"),
        pytest.param({"sources": [0, 1]}, id="copies sequences"),
        pytest.param({"offsets": [0, 0]}, id="other positions"),
        pytest.param({"format": WireFormat.FLOAT16}, id="another format"),
        pytest.param({"dtype": "float16"}, id="another dtype"),
        pytest.param({"left": [2, 0]}, id="a token has left"),
        pytest.param({"exits": messages.ExitTerms("softmax", ((2, 0.5),))}, id="tokens may leave"),
        pytest.param({"counts": [MAX_SHORT_TOKENS, 0]}, id="too many tokens of a sequence"),
    ],
)
def test_steps_that_do_more_than_continue_are_not_merged(changes):
    first, second = step(5, (9, 4), (1, 0)), step(6, (10, 4), (1, 1))
    assert mergeable([first, second]) == 2
    assert mergeable([first, changed(second, **changes)]) == 1
    if "sources" in changes or "left" in changes or "exits" in changes:
        assert mergeable([changed(first, **changes), second]) == 1


def test_a_step_is_urgent_where_its_token_cannot_have_left():
    assert is_urgent(step(), 4)
    assert [is_urgent(step(exit_block=4), block) for block in (3, 4, 5)] == [True, False, False]


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1)))
def test_each_token_of_merged_steps_has_its_place(counts):
    starts, steps = np.zeros(len(counts[0]), int), []
    for number, one in enumerate(counts):
        steps.append(step(number, starts.tolist(), one, 0))
        starts = starts + np.array(one)
    steps = steps[: mergeable(steps)]
    merged = MergedSteps.of(steps)
    assert merged.layout.tokens == sum(map(len, merged.rows))
    places = [(s, p) for s, count in enumerate(merged.layout.counts) for p in range(count)]
    for one, rows in zip(steps, merged.rows, strict=True):
        expected = [
            (s, p) for s, (p, n) in enumerate(zip(one.starts, one.counts, strict=True)) for p in range(p, p + n)
        ]
        assert [places[row] for row in rows] == expected


class Engine:
    """Computes what is submitted a little later, as a real one does.

    Args:
        on_submit: called in between.
    """

    def __init__(self, on_submit: Callable[[], None]) -> None:
        self.tokens: list[int] = []
        self._on_submit = on_submit

    def submit(self, work: ForwardWork) -> asyncio.Future[ComputeResult]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[ComputeResult] = loop.create_future()
        loop.call_soon(self._on_submit)
        loop.call_soon(self._compute, work, future)
        return future

    def _compute(self, work: ForwardWork, future: asyncio.Future[ComputeResult]) -> None:
        if future.done():
            return
        inputs = work.decode()
        if (inputs[:, 0] == POISON).any():
            return future.set_exception(RuntimeError("poison"))
        self.tokens.append(work.layout.tokens)
        future.set_result(ComputeResult(work.encode(work.cache.step(inputs, work.layout)), 1.0))


class Link:
    """Takes two of three outputs."""

    reply_delay_s = 0.0

    def __init__(self) -> None:
        self.taken: list[messages.StepRequest] = []

    async def push(self, request: messages.StepRequest, payload: Any) -> bool:
        self.taken.append(request)
        return request.step % 3 > 0

    def close(self) -> None: ...


class Part:
    """A session into which steps are pushed, one by one or several as one.

    Args:
        while_computing: what the client gives up while the push of this index is computed, or the steps of which it is
            the first.
    """

    def __init__(self, model: SpanModel, while_computing: dict[int, range]) -> None:
        self.engine: Any = Engine(self._give_up)
        self.link: Any = Link()
        self.sessions = SessionTable(1000, lambda: 0.0, peer_share=1.0)
        terms = SessionTerms(b"session", "client", SPAN, MAX_LENGTH, WireFormat.NONE)
        self.session = Session(terms, SessionCache(model))
        validator = RequestValidator(model, REVISION, RequestLimits())
        self.steps = SessionSteps(self.sessions, self.engine, validator, ServerObserver())
        self._while_computing = dict(while_computing)
        self._index = 0

    def _give_up(self) -> None:
        numbers = self._while_computing.pop(self._index, None)
        if numbers is not None:
            self.session.give_up(numbers.start, numbers.stop)

    async def run(self, pushes: Sequence[Pushed], sequences: int, merge: bool) -> list[Outcome]:
        await self.sessions.open_session(self.session, sequences)
        self.session.push_link = self.link
        found: list[Outcome] = []
        while (index := len(found)) < len(pushes):
            self._index = index
            group = pushes[index : index + (mergeable([one for one, _ in pushes[index:]]) if merge else 1)]
            outcomes = await self.steps.run_merged(self.session, group) if len(group) > 1 else None
            if outcomes is None:
                for number, (request, payload) in enumerate(group, index):
                    self._index = number
                    found.append(await self.run_one(request, payload))
                continue
            for (request, _), (outcome, output) in zip(group, outcomes, strict=True):
                if isinstance(outcome, messages.StepReply):
                    outcome = await self.steps.push_outputs(self.session, request, outcome, output)
                found.append(described(outcome, output))
        return found

    async def run_one(self, request: messages.StepRequest, payload: bytes, asked: bool = False) -> Outcome:
        try:
            return described(*await self.steps.run_step(self.session, request, payload, asked_by_client=asked))
        except RemoteError as error:
            return described(error)
        except RuntimeError:
            return "server fault", None, None


def described(outcome: messages.StepReply | RemoteError | None, output: Any = b"") -> Outcome:
    if isinstance(outcome, RemoteError):
        return outcome.code, None, None
    return (
        ("answered" if outcome is not None else "dropped"),
        outcome,
        torch.frombuffer(bytearray(output), dtype=torch.float32) if output else None,
    )


@st.composite
def queues(draw: st.DrawFn) -> tuple[int, list[Pushed]]:
    """A number of sequences, and pushed steps: most of them continue the one before, as those of a text do."""
    sequences = draw(st.integers(1, 2))
    starts, number, epoch = [0] * sequences, 0, 0
    pushes: list[Pushed] = []
    kinds = st.sampled_from(["on"] * 10 + ["back", "twice", "late", "ahead", "gap", "poison", "short"])
    for seed, kind in enumerate(draw(st.lists(kinds, min_size=1, max_size=12))):
        if kind == "twice" and pushes:
            pushes.append(pushes[-1])
            continue
        counts = draw(st.lists(st.integers(0, 2), min_size=sequences, max_size=sequences).filter(any))
        if kind == "back":
            number, starts = number + draw(st.integers(0, 2)), [draw(st.integers(0, start)) for start in starts]
            epoch = number
        follows = number + draw(st.integers(-2, 0)) if kind == "back" and number > 1 else None
        hidden = torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(seed))
        if kind == "poison":
            hidden[0, 0] = POISON
        own = max(0, number - 1) if kind == "late" else number + (kind == "gap")
        at = [start + (kind == "ahead") for start in starts]
        request = step(own, at, counts, epoch, follows=follows)
        pushes.append((request, bytes(encode_tensor(hidden, WireFormat.NONE))[(kind == "short") :]))
        number, starts = own + 1, [start + count for start, count in zip(starts, counts, strict=True)]
    return sequences, pushes


@given(queue=queues(), data=st.data())
def test_merged_steps_give_what_they_give_one_by_one(model, queue, data):
    """Whatever comes between: duplicates, errors, gaps, and what the client gives up before or meanwhile.

    The client gives up everything from some step on, as it does. (What it says of steps in between may come too late,
    here and there.)
    """
    sequences, pushes = queue
    end = max(request.step for request, _ in pushes) + 1
    firsts, index = [], 0
    while index < len(pushes):
        firsts.append(index)
        index += mergeable([request for request, _ in pushes[index:]])
    given_up: dict[int, range] = {}
    for first in data.draw(st.lists(st.sampled_from(firsts), unique=True, max_size=1)):
        given_up[first] = range(data.draw(st.integers(0, end - 1)), end)
    before = data.draw(st.none() | st.tuples(st.integers(0, end), st.integers(0, end)))

    async def compare() -> None:
        found = {}
        for merge in (False, True):
            part = Part(model, given_up)
            if before is not None:
                part.session.give_up(min(before), max(before))
            found[merge] = part, await part.run(pushes, sequences, merge)
        (single, expected), (merged, outcomes) = found[False], found[True]
        assert_same(outcomes, expected)
        assert merged.link.taken == single.link.taken
        assert (merged.session.next_step, merged.session.epoch) == (single.session.next_step, single.session.epoch)
        if not given_up:
            assert merged.session.cache.lengths == single.session.cache.lengths
        assert bool(merged.session.last) == bool(single.session.last)
        assert merged.session.last.keys() >= single.session.last.keys()
        again = [await part.run_one(*pushes[-1], asked=True) for part in (single, merged)]
        assert_same(again[1:], again[:1])

    asyncio.run(compare())


def assert_same(found: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for (_, _, output), (_, _, right) in zip(found, expected, strict=True):
        assert (output is None) == (right is None)
        if output is not None and right is not None:
            torch.testing.assert_close(output, right, rtol=1e-4, atol=1e-4)


def test_what_can_be_merged_is(model):
    """Otherwise the test above would compare one thing with itself."""
    pushes = [
        (step(number, [number, 0], [1, 0], 0), bytes(encode_tensor(torch.ones(1, HIDDEN), WireFormat.NONE)))
        for number in range(5)
    ]
    part = Part(model, {0: range(3, 5)})
    outcomes = asyncio.run(part.run(pushes, 2, merge=True))
    assert part.engine.tokens == [5]
    assert [kind for kind, _, _ in outcomes] == ["answered"] * 3 + ["dropped"] * 2
    assert (part.session.next_step, [one.step for one in part.link.taken]) == (3, [0, 1, 2])
    part = Part(model, {0: range(0, 5)})
    assert [kind for kind, _, _ in asyncio.run(part.run(pushes, 2, merge=True))] == ["dropped"] * 5
    assert part.engine.tokens == []


def test_each_of_the_merged_steps_can_be_asked_for_again(model):
    """Until the next step: the answer may have been lost, or the client may have delivered the step as well."""
    pushes = [
        (step(number, [number], [1], 0), bytes(encode_tensor(torch.full((1, HIDDEN), 1.0 + number), WireFormat.NONE)))
        for number in range(5)
    ]

    async def act() -> None:
        part = Part(model, {})
        answers = await part.run(pushes[:4], 1, merge=True)
        assert part.engine.tokens == [4]
        assert_same([await part.run_one(*one, asked=True) for one in pushes[:4]], [unpushed(one) for one in answers])
        assert {(await part.run_one(*one))[0] for one in pushes[:4]} == {"dropped"}
        other = pushes[1][0], pushes[2][1]
        assert (await part.run_one(*other, asked=True))[0] == "wrong_position"
        assert part.engine.tokens == [4]
        await part.run_one(*pushes[4])
        assert (await part.run_one(*pushes[3], asked=True))[0] == "wrong_position"

    asyncio.run(act())


def unpushed(outcome: Outcome) -> Outcome:
    """The outcome as it is kept: before its output goes on."""
    kind, reply, output = outcome
    return kind, changed(reply, pushed=False), output


@pytest.mark.parametrize("cause", ["a fault", "given up"])
def test_why_steps_could_not_be_computed_as_one_is_logged(model, caplog, cause):
    """If only merged steps fail, each costs twice as much from then on. That it happens again need not be said."""
    hidden = torch.full((1, HIDDEN), POISON if cause == "a fault" else 1.0)
    pushes = [(step(number, [number], [1], 0), bytes(encode_tensor(hidden, WireFormat.NONE))) for number in range(3)]
    part = Part(model, {} if cause == "a fault" else {0: range(0, 3)})
    for _ in range(2):
        asyncio.run(part.run(pushes, 1, merge=True))
    logged = [(record.getMessage(), str(record.exc_info and record.exc_info[1])) for record in caplog.records]
    expected = [("computing steps as one failed with RuntimeError; they are computed one by one", "poison")]
    assert logged == (expected if cause == "a fault" else [])


@pytest.mark.parametrize("wire", [WireFormat.NONE, WireFormat.FLOAT16, WireFormat.BLOCKWISE8])
def test_each_of_the_merged_steps_gets_its_own_rows_in_every_format(model, wire):
    """Quantized values share a scale with their neighbors, so those of one step must not depend on another's."""
    hidden = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    pushes = [
        (
            step(number, [number, number], [1, 1], 0),
            bytes(encode_tensor(hidden[2 * number : 2 * number + 2], WireFormat.NONE)),
        )
        for number in range(3)
    ]

    async def outputs(merge: bool) -> list[torch.Tensor]:
        part = Part(model, {})
        await part.sessions.open_session(part.session, 2)
        object.__setattr__(part.session.terms, "reply_format", wire)
        group = await part.steps.run_merged(part.session, pushes) if merge else None
        found = (
            [await part.steps.run_step(part.session, *one, asked_by_client=False) for one in pushes]
            if not merge
            else group
        )
        assert found is not None
        return [decode_tensor(bytes(output), 2, HIDDEN, wire, "float32", CPU) for _, output in found]

    for merged, single in zip(asyncio.run(outputs(True)), asyncio.run(outputs(False)), strict=True):
        torch.testing.assert_close(merged, single, rtol=0.02, atol=0.02)


def test_steps_that_continue_one_that_was_given_up_meanwhile_are_refused(model):
    """No client sends them. One by one, their positions would be wrong."""
    payload = bytes(encode_tensor(torch.ones(1, HIDDEN), WireFormat.NONE))
    pushes = [(step(number, [number], [1], 0), payload) for number in range(4)]
    part = Part(model, {0: range(1, 2)})
    outcomes = asyncio.run(part.run(pushes, 1, merge=True))
    assert [kind for kind, _, _ in outcomes] == ["answered", "dropped", "wrong_position", "wrong_position"]
    assert part.session.next_step == 1


def test_steps_that_need_more_cache_wait_for_it_one_by_one(model):
    payload = bytes(encode_tensor(torch.ones(2, HIDDEN), WireFormat.NONE))
    pushes = [(step(number, [number] * 2, [1, 1], 0), payload) for number in range(3)]
    part = Part(model, {})
    outcomes = asyncio.run(part.run(pushes, 1, merge=True))
    assert [kind for kind, _, _ in outcomes] == ["answered"] * 3
    assert (part.session.sequences, part.engine.tokens) == (2, [2, 2, 2])
