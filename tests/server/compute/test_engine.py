"""Requests of many sessions, computed together by real blocks, against each session's rows computed alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm.data_structures import Span, StepLayout
from swarm.errors import ServerClosing, WrongPosition
from swarm.metrics.server import ServerObserver
from swarm.models.execution.session_cache import SessionCache, advance_steps
from swarm.models.execution.span_model import SpanModel
from swarm.server.compute import engine as engine_module
from swarm.server.compute import scheduler
from swarm.server.compute.batching_delay import BatchingDelay
from swarm.server.compute.compute_request import ComputeResult, ForwardWork
from swarm.server.compute.compute_thread import ComputeThread
from swarm.server.compute.engine import (
    MAX_ITERATION_TOKENS,
    MAX_REMEMBERED_WAITS,
    MIN_ITERATION_TOKENS,
    WAIT_FADE_S,
    Engine,
    QueueMeter,
    token_budget,
)
from tests.async_tests import as_test
from tests.models.execution.test_session_cache import HIDDEN, load

SOON = 60.0
FAMILIES = ("llama", "falcon_alibi")
"""One that can be packed and one that cannot."""

MANY = 8
"""More requests than go into one iteration in the tests of failures."""


REFERENCES: dict[str, SpanModel] = {}
"""Family to the same blocks on the slow path. One of its own, because what tests it must not be computed by it."""

REFERENCE_LOCK = threading.Lock()


def both(family: str, factory: pytest.TempPathFactory) -> SpanModel:
    model = load(family, factory)
    REFERENCES[model.family] = load(family, factory, packed=False)
    return model


def expected_of(model: SpanModel, row_TH: torch.Tensor) -> torch.Tensor:
    """Outputs of a row that is computed at once, alone."""
    with REFERENCE_LOCK:
        return REFERENCES[model.family].narrowed(model.span).forward(row_TH.unsqueeze(0))[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> SpanModel:
    return both("llama", tmp_path_factory)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> SpanModel:
    model = both(request.param, tmp_path_factory)
    assert model.strategy.packed == (request.param == "llama")
    return model


class Session:
    """A session of one row whose outputs are checked.

    Attributes:
        history: all inputs so far.
    """

    def __init__(self, engine: Engine, model: SpanModel, seed: int = 0, peer: str = "") -> None:
        self.engine = engine
        self.model = model
        self.cache = SessionCache(model)
        self.peer = peer or f"peer {seed}"
        self.history = torch.empty(0, HIDDEN)
        self._seed = seed
        self._random = torch.Generator().manual_seed(seed)

    def inputs(self, tokens: int) -> torch.Tensor:
        return torch.randn(tokens, HIDDEN, generator=self._random)

    def request(self, hidden: torch.Tensor, **changes: Any) -> ForwardWork:
        """A step with these inputs; its output travels as it is."""
        layout = StepLayout((len(self.history),), (len(hidden),))
        options = {
            "peer": self.peer,
            "session": (self.peer, self._seed),
            "cache": self.cache,
            "layout": layout,
            "decode": lambda: hidden,
            "encode": lambda output: output.numpy().tobytes(),
        }
        return ForwardWork(**{**options, **changes})

    async def step(self, tokens: int) -> ComputeResult:
        hidden = self.inputs(tokens)
        outcome = await self.engine.compute(self.request(hidden))
        self.check(hidden, outcome)
        return outcome

    def check(self, hidden: torch.Tensor, outcome: ComputeResult) -> None:
        """The step that brought `hidden` has the right outputs, and the next one may follow."""
        self.history = torch.cat([self.history, hidden])
        output = torch.frombuffer(bytearray(outcome.payload), dtype=torch.float32).view(-1, HIDDEN)
        expected = expected_of(self.model, self.history)[-len(hidden) :]
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
        assert self.cache.lengths == (len(self.history),)


Scenario = Callable[[Engine], Awaitable[None]]


def run(scenario: Scenario, budget: int = 4096) -> None:
    async def whole() -> None:
        runtime = ComputeThread()
        try:
            async with asyncio.timeout(SOON):
                await scenario(Engine(runtime, budget))
        finally:
            runtime.close()

    asyncio.run(whole())


engine_test = as_test(run, "engine")


class Pause:
    """Keeps the compute thread busy, so that whatever is asked for meanwhile goes into the next iteration together."""

    def __init__(self, engine: Engine) -> None:
        self._go_on = threading.Event()
        assert engine.compute_thread.post(lambda: self._go_on.wait(SOON) or None)

    def release(self) -> None:
        """Let the compute thread go on."""
        self._go_on.set()

    async def end(self, *awaitables: Awaitable[Any]) -> list[Any]:
        """The outcomes, or errors, of what began during the pause."""
        tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
        await asyncio.sleep(0)
        self.release()
        return await asyncio.gather(*tasks, return_exceptions=True)


def recorded(model: SpanModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each packed forward from now on."""
    sizes: list[int] = []
    forward = model.forward_tokens

    def note(hidden, *args):
        sizes.append(len(hidden))
        return forward(hidden, *args)

    monkeypatch.setattr(model, "forward_tokens", note)
    return sizes


@engine_test(budget=20)
async def test_many_sessions_at_once_give_what_each_gives_alone(engine, model):
    async def write(seed):
        session = Session(engine, model, seed)
        for tokens in (3 + 7 * seed, 1, 1, 4, 1):
            await session.step(tokens)

    await asyncio.gather(*(write(seed) for seed in range(12)))


@engine_test()
async def test_sessions_that_wait_go_into_one_forward(engine, llama, monkeypatch):
    sessions = [Session(engine, llama, seed) for seed in range(6)]
    sizes = recorded(llama, monkeypatch)
    await Pause(engine).end(*(session.step(5) for session in sessions))
    assert sizes == [30]
    await Pause(engine).end(*(session.step(1) for session in sessions))
    assert sizes == [30, 6]


@engine_test(budget=5)
async def test_ragged_rows_that_are_cut_anywhere(engine, model):
    cache, counts = SessionCache(model), (7, 0, 23, 1)
    hidden = torch.randn(sum(counts), HIDDEN)
    request = Session(engine, model).request(hidden, cache=cache, layout=StepLayout((0,) * 4, counts))
    outcome = await engine.compute(request)
    output = torch.frombuffer(bytearray(outcome.payload), dtype=torch.float32).view(-1, HIDDEN)
    expected = torch.cat([expected_of(model, row) for row in hidden.split(counts) if len(row)])
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert cache.lengths == counts


@engine_test()
async def test_a_step_that_is_not_urgent_lets_urgent_ones_go_first(engine, llama, monkeypatch):
    monkeypatch.setattr(scheduler, "MAX_YIELD_S", SOON)
    sessions = [Session(engine, llama, seed) for seed in range(4)]
    for session in sessions:
        await session.step(3)
    sizes = recorded(llama, monkeypatch)
    lazy = sessions[0]
    hidden = lazy.inputs(5)
    *_, outcome = await Pause(engine).end(
        *(session.step(2) for session in sessions[1:]), engine.compute(lazy.request(hidden, urgent=False))
    )
    assert sizes == [6 + 3, 2], "a part of it is taken along; then it has begun, and does not yield any more"
    lazy.check(hidden, outcome)
    hidden, sizes[:] = lazy.inputs(1), []
    lazy.check(hidden, await engine.compute(lazy.request(hidden, urgent=False)))
    assert sizes == [1]


@engine_test()
async def test_a_request_that_is_settled_by_its_caller_is_dropped(engine, llama, monkeypatch):
    gone, good = Session(engine, llama, 1), Session(engine, llama, 2)
    await gone.step(3)
    sizes = recorded(llama, monkeypatch)
    pause = Pause(engine)
    unwanted = engine.submit(gone.request(gone.inputs(7)))
    unwanted.set_exception(Broken())
    await pause.end(good.step(2))
    assert sizes == [2]
    with pytest.raises(Broken):
        await unwanted
    await gone.step(1)


@engine_test()
async def test_requests_that_are_settled_by_its_caller_do_not_pile_up(engine, llama):
    """Whatever is sent and given up meanwhile, an iteration that takes long keeps none of it in memory."""
    gone = Session(engine, llama)
    pause = Pause(engine)
    for _ in range(50):
        engine.submit(gone.request(gone.inputs(1))).set_exception(Broken())
        await asyncio.sleep(0)
    assert not engine._arrived
    assert not engine._queue
    await pause.end(gone.step(1))


def test_nothing_waits_together_with_a_request_that_is_not_wanted(llama, monkeypatch):
    waiting: list[int] = []
    asked = threading.Event()

    def watched(self, urgent, waited, groups, now, span, joins_parts, yielding):
        waiting.append(urgent + yielding)
        asked.set()
        return 0.0

    async def scenario(engine):
        monkeypatch.setattr(BatchingDelay, "delay", watched)
        gone, good = Session(engine, llama, 1), Session(engine, llama, 2)
        pause = Pause(engine)
        unwanted, wanted = (engine.submit(one.request(one.inputs(1))) for one in (gone, good))
        unwanted.set_exception(Broken())
        pause.release()
        asked.wait(SOON)  # the loop, which would remove the request, has to wait as well
        await wanted
        assert waiting == [1]

    run(scenario)


def test_a_request_that_is_settled_while_it_is_computed_gives_way_to_the_next_of_its_session(model, monkeypatch):
    """The next one sets back what it has cached, and its session, which waits, does not count as away."""
    computing, go_on = threading.Event(), threading.Event()
    answered: list[object] = []
    advance, on_answer = engine_module.advance_steps, BatchingDelay.on_answer

    def slow(parts):
        computing.set()
        go_on.wait(SOON)
        advance(parts)

    def watched(self, session, now):
        answered.append(session)
        on_answer(self, session, now)

    async def scenario(engine):
        session = Session(engine, model)
        await session.step(3)
        monkeypatch.setattr(engine_module, "advance_steps", slow)
        monkeypatch.setattr(BatchingDelay, "on_answer", watched)
        unwanted = engine.submit(session.request(session.inputs(2)))
        await asyncio.to_thread(computing.wait, SOON)
        unwanted.set_exception(Broken())
        hidden = session.inputs(1)
        wanted = engine.submit(session.request(hidden))
        go_on.set()
        session.check(hidden, await wanted)
        assert len(answered) == 1
        await session.step(1)

    monkeypatch.setattr(engine_module, "MAX_INLINE_ITERATION_S", 0.0)
    run(scenario)


@pytest.mark.parametrize("reason", ["given up", "failed"])
@engine_test()
async def test_an_iteration_that_computes_nothing_does_not_count_as_a_quick_one(engine, llama, monkeypatch, reason):
    """The next step of slow blocks would be computed in the network loop."""
    session = Session(engine, llama)
    await session.step(3)
    engine._batching_delay.on_iteration(SOON)
    hidden = session.inputs(1)
    with monkeypatch.context() as patch:
        poison(patch, llama, hidden)
        pause = Pause(engine)
        future = engine.submit(session.request(hidden))
        if reason == "given up":
            future.set_exception(Broken())
        pause.release()
        with pytest.raises(Broken):
            await future
        while engine._running:
            await asyncio.sleep(0)
    assert engine._batching_delay.iteration == SOON
    await session.step(1)
    assert 0 < engine._batching_delay.iteration < SOON


class Broken(Exception):
    pass


class OutOfMemory(BaseException):
    pass


def broken(*args: object) -> Any:
    raise Broken


@pytest.mark.parametrize("stage", ["decode", "begin", "forward", "encode"])
def test_a_request_that_fails_fails_alone(model, monkeypatch, stage):
    place = 3

    async def scenario(engine):
        sessions = [Session(engine, model, seed) for seed in range(MANY)]
        for session in sessions:
            await session.step(3)
        bad = sessions[place]
        hidden = bad.inputs(2)
        request = bad.request(hidden)
        with monkeypatch.context() as patch:
            if stage == "decode":
                request = bad.request(hidden, decode=broken)
            elif stage == "encode":
                request = bad.request(hidden, encode=broken)
            elif stage == "begin":
                request = bad.request(hidden, layout=StepLayout((4,), (2,)))
            else:
                poison(patch, model, hidden)
            computing = [session.step(2) for session in sessions]
            computing[place].close()
            computing[place] = engine.compute(request)
            results = await Pause(engine).end(*computing)
        for number, result in enumerate(results):
            if number == place:
                assert isinstance(result, WrongPosition if stage == "begin" else Broken)
            else:
                assert isinstance(result, ComputeResult), result
        await bad.step(2)  # it may go on as if nothing had been
        for session in sessions:
            await session.step(1)

    run(scenario)


def poison(patch: pytest.MonkeyPatch, model: SpanModel, hidden: torch.Tensor) -> None:
    """Whatever forward holds the first of these tokens fails after it has written to the cache."""
    for name in ("forward", "forward_tokens"):
        forward = getattr(model, name)

        def fragile(inputs, *args, forward=forward):
            output = forward(inputs, *args)
            if (inputs.reshape(-1, HIDDEN) == hidden[0]).all(dim=1).any():
                raise Broken
            return output

        patch.setattr(model, name, fragile)


@engine_test()
async def test_several_that_fail_are_found_without_computing_each_alone(engine, llama, monkeypatch):
    sessions = [Session(engine, llama, seed) for seed in range(64)]
    hidden = [session.inputs(2) for session in sessions]
    sizes = recorded(llama, monkeypatch)
    poison(monkeypatch, llama, hidden[17])
    results = await Pause(engine).end(
        *(engine.compute(session.request(own)) for session, own in zip(sessions, hidden, strict=True))
    )
    monkeypatch.undo()
    assert [number for number, result in enumerate(results) if isinstance(result, Broken)] == [17]
    for number, (session, result) in enumerate(zip(sessions, results, strict=True)):
        if number != 17:
            session.check(hidden[number], result)
    assert len(sizes) == 13  # one for all, two halves of what failed each time


@pytest.mark.parametrize("error", [Broken(), StopIteration("end"), OutOfMemory()], ids=repr)
@engine_test()
async def test_whatever_a_request_raises_the_others_get_their_results(engine, llama, error):
    def fail():
        raise error

    bad, good = Session(engine, llama, 1), Session(engine, llama, 2)
    failed, right = await Pause(engine).end(
        engine.compute(bad.request(bad.inputs(1), decode=fail)),
        good.step(1),
    )
    # A future cannot carry StopIteration itself.
    assert failed is error or "StopIteration" in str(failed)
    assert isinstance(right, ComputeResult)
    await good.step(1)


@engine_test()
async def test_an_engine_that_fails_itself_tells_everybody_and_goes_on(engine, llama, monkeypatch):
    sessions = [Session(engine, llama, seed) for seed in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr("swarm.server.compute.engine.next_batch", broken)
        results = await Pause(engine).end(*(session.step(1) for session in sessions))
        assert all(isinstance(result, Broken) for result in results)
    for session in sessions:
        await Session(engine, llama, 9).step(1)
        await session.step(1)


@pytest.mark.parametrize("moment", ["waiting", "in the middle"])
@engine_test(budget=20)
async def test_a_caller_that_leaves_harms_nobody(engine, llama, monkeypatch, moment):
    gone, good = Session(engine, llama, 1), Session(engine, llama, 2)
    await gone.step(3)
    sizes = recorded(llama, monkeypatch)
    began, go_on = threading.Event(), threading.Event()
    if moment == "in the middle":
        noted = llama.forward_tokens

        def slow(*args):
            began.set()
            go_on.wait(SOON)
            return noted(*args)

        monkeypatch.setattr(llama, "forward_tokens", slow)
        unwanted = asyncio.create_task(engine.compute(gone.request(gone.inputs(100))))
        await asyncio.to_thread(began.wait, SOON)
        unwanted.cancel()
        go_on.set()
    else:
        pause = Pause(engine)
        unwanted = asyncio.create_task(engine.compute(gone.request(gone.inputs(100))))
        await asyncio.sleep(0)
        unwanted.cancel()
        await asyncio.sleep(0)
        await pause.end()
    with pytest.raises(asyncio.CancelledError):
        await unwanted
    await good.step(1)
    assert sizes == ([20, 1] if moment == "in the middle" else [1])
    await gone.step(2)  # the same session goes on from where it was


@engine_test(budget=20)
async def test_close_ends_what_waits_and_finishes_what_was_posted(engine, llama):
    sessions = [Session(engine, llama, seed) for seed in range(3)]
    pause = Pause(engine)
    asking = [asyncio.create_task(engine.compute(one.request(one.inputs(50)))) for one in sessions]
    short = asyncio.create_task(Session(engine, llama, 9).step(1))
    await asyncio.sleep(0)
    engine.compute_thread.close()
    await pause.end()
    assert isinstance(await short, ComputeResult)  # the one iteration that was posted before
    for one in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(one, ServerClosing)
    for session in sessions:
        with pytest.raises(ServerClosing):
            await engine.compute(session.request(session.inputs(1)))


@engine_test(budget=8)
async def test_close_at_any_moment_leaves_nobody_waiting(engine, llama):
    """Callers in two loops, while a third thread closes."""

    async def write(seed, results):
        session = Session(engine, llama, seed)
        try:
            while True:
                await session.step(1 + seed % 3)
        except ServerClosing:
            results.append(seed)

    async def writers(seeds, results):
        async with asyncio.timeout(SOON):
            await asyncio.gather(*(write(seed, results) for seed in seeds))

    results: list[int] = []
    other = asyncio.to_thread(asyncio.run, writers(range(4), results))
    closing = threading.Timer(0.03, engine.compute_thread.close)
    closing.start()
    await asyncio.gather(other, writers(range(4, 8), results))
    closing.join()
    assert sorted(results) == list(range(8))


@engine_test()
async def test_a_loop_that_is_gone_does_not_hurt_the_others(engine, llama, monkeypatch):
    """Its results find nobody, even if the loop ends while they are computed."""
    computing, go_on = threading.Event(), threading.Event()
    forward = llama.forward_tokens

    def slow(*args):
        computing.set()
        go_on.wait(SOON)
        return forward(*args)

    async def leave() -> None:
        gone = Session(engine, llama, 1)
        asking = asyncio.create_task(engine.compute(gone.request(gone.inputs(1))))
        await asyncio.to_thread(computing.wait, SOON)
        asking.cancel()

    monkeypatch.setattr(llama, "forward_tokens", slow)
    await asyncio.to_thread(asyncio.run, leave())
    go_on.set()
    await Session(engine, llama, 2).step(1)


def test_parts_of_the_span_share_iterations(model):
    """Where sessions share them at all. Outputs are those of the blocks that each session uses."""
    iterations: list[int] = []

    class Watching(ServerObserver):
        def iteration_finished(self, requests, seconds):
            iterations.append(len(requests))

    async def scenario(engine):
        engine._observer = Watching()
        parts = [model, model.narrowed(Span(2, 3)), model.narrowed(Span(1, 3))]
        sessions = [Session(engine, parts[seed % 3], seed) for seed in range(6)]
        results = await Pause(engine).end(*(session.step(30) for session in sessions))
        assert all(isinstance(result, ComputeResult) for result in results)
        iterations.clear()
        await Pause(engine).end(*(session.step(1) for session in sessions))
        assert iterations == ([6] if model.joins_parts else [2, 2, 2])

    run(scenario, budget=32)


def test_a_lone_quick_step_is_computed_where_it_came(llama, monkeypatch):
    """Once it is known that steps are quick, and only if nothing else waits."""
    threads: list[int] = []
    advance = engine_module.advance_steps

    def watched(works: Any) -> None:
        threads.append(threading.get_ident())
        advance(works)

    async def scenario(engine: Engine) -> None:
        async def idle() -> None:
            """Return when the compute thread is through with its last job."""
            while not engine.compute_thread.try_run_inline(lambda: None):
                await asyncio.sleep(0)

        monkeypatch.setattr(engine_module, "advance_steps", watched)
        one, two = Session(engine, llama, 1), Session(engine, llama, 2)
        monkeypatch.setattr(engine_module, "MAX_INLINE_ITERATION_S", 0.0)
        for tokens in (5, 1, 1):
            await one.step(tokens)
        here = threading.get_ident()
        assert here not in threads
        await idle()
        monkeypatch.setattr(engine_module, "MAX_INLINE_ITERATION_S", 60.0)
        threads.clear()
        await one.step(1)
        assert threads == [here]
        await two.step(40)  # long
        assert threads.pop() != here
        await idle()
        waits = [0.001, 0.001]
        monkeypatch.setattr(BatchingDelay, "delay", lambda *_: waits.pop() if waits else 0.0)
        threads.clear()
        await one.step(1)  # others are about to come, for whom the loop cannot wait
        assert here not in threads

    run(scenario)


def test_a_step_that_may_wait_for_a_drive_never_runs_in_the_loop(llama, monkeypatch):
    threads: list[int] = []

    def watched(parts: Any) -> None:
        threads.append(threading.get_ident())
        advance_steps(parts)

    async def scenario() -> None:
        compute_thread = ComputeThread()
        engine = Engine(compute_thread, inline=False)
        monkeypatch.setattr(engine_module, "advance_steps", watched)
        monkeypatch.setattr(engine_module, "MAX_INLINE_ITERATION_S", 60.0)
        session = Session(engine, llama, 1)
        try:
            for tokens in (5, 1, 1, 1):
                await session.step(tokens)
                while not compute_thread.try_run_inline(lambda: None):
                    await asyncio.sleep(0)  # a step now would run in the loop, if it might
        finally:
            compute_thread.close()

    asyncio.run(scenario())
    assert len(threads) == 4
    assert threading.get_ident() not in threads


def test_the_budget_fits_the_blocks():
    budgets = [token_budget(rate) for rate in (0.0, 1.0, 1e3, 1e4, 1e9)]
    assert budgets == sorted(budgets)
    assert (budgets[0], budgets[-1]) == (MIN_ITERATION_TOKENS, MAX_ITERATION_TOKENS)


@pytest.mark.parametrize("jobs", [1, 100_000])
def test_it_fades_when_nothing_comes_whatever_came_before(jobs):
    meter = QueueMeter()
    for _ in range(jobs):
        meter.record_start(5.0, 0.0)
    assert meter.expected_wait(10 * WAIT_FADE_S) < 5.0 * MAX_REMEMBERED_WAITS * 1e-4
    assert meter.expected_wait(20 * WAIT_FADE_S) < meter.expected_wait(10 * WAIT_FADE_S)


@given(st.lists(st.tuples(st.floats(-1, 3600), st.floats(-1, 1000)), max_size=40), st.floats(0, 1e4))
def test_it_lies_between_nothing_and_the_longest_wait(jobs, later):
    meter = QueueMeter()
    now = 0.0
    for waited, step in jobs:  # clocks of two threads may be read in the wrong order
        now += step
        meter.record_start(waited, now)
    longest = max((waited for waited, _ in jobs), default=0.0)
    assert 0 <= meter.expected_wait(now + later) <= max(longest, 0.0) * (1 + 1e-9)
    assert meter.expected_wait(now + later + 1) <= meter.expected_wait(now + later) * (1 + 1e-9)
