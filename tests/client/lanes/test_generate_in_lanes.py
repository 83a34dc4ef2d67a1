"""`generate` in lanes, over real server processes, against the same `generate` without."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from swarm.client.lanes.generate_in_lanes import run_lanes
from swarm.client.threads.compute_lock import ComputeTicket, RandomState
from swarm.client.threads.network_thread import NetworkThread
from swarm.errors import CacheFull, InvalidOption, SwarmError, UsageError
from tests.swarms import TestSwarm, run_client, run_swarm

SPANS = ("0:2", "2:3", "3:6")
PAD = 0
TEXTS = [[5, 6, 7], [8, 9, 10, 11, 12], [20], [30, 31, 32, 33], [41, 42]]
LONGEST = max(map(len, TEXTS))
IDS = torch.tensor([[PAD] * (LONGEST - len(text)) + text for text in TEXTS])
BATCH = {"input_ids": IDS, "attention_mask": (IDS != PAD).long()}
NEW = 10


@pytest.fixture(scope="module")
def swarm(folder: Path) -> Iterator[TestSwarm]:
    # Room for the lanes of two calls, so that lanes that leave their sessions open make a later one fail.
    with run_swarm(folder, SPANS, dtype="float32", cache_tokens=1000) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def model(swarm: TestSwarm) -> Iterator[Any]:
    with run_client(swarm, dtype="float32", wait_for_blocks=1.0) as model:
        yield model


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("swarm-lane")]


def write(model: Any, **settings: Any) -> Any:
    settings = {**BATCH, "max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **settings}
    return model.generate(**settings)


def endings(local: Any) -> list[int]:
    """Tokens at which the texts end at different times, one of them never."""
    written = write(local)[:, LONGEST:]
    return [int(written[row, 2 + row]) for row in range(len(TEXTS) - 1)]


@pytest.mark.parametrize(
    ("settings", "lanes"),
    [
        ({}, "auto"),
        ({"num_beams": 4, "num_return_sequences": 2}, 2),
        ({"use_cache": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, 3),
    ],
    ids=["auto", "beams", "no cache"],
)
def test_texts_are_the_same_as_without(model: Any, local: Any, settings: dict[str, Any], lanes: Any) -> None:
    assert write(model, lanes=lanes, **settings).tolist() == write(local, **settings).tolist()


@pytest.mark.parametrize(("beams", "pad"), [(3, 1), (1, None)])
def test_lanes_that_end_early_are_filled_up(model: Any, local: Any, beams: int, pad: int | None) -> None:
    settings = {"eos_token_id": endings(local), "num_beams": beams, "pad_token_id": pad}
    expected = write(local, **settings)
    lengths = (expected[:, LONGEST:] != expected[:, -1:]).sum(1)
    assert beams > 1 or len(set(lengths.tolist())) > 2  # they do end at different times
    for lanes in (2, 5):
        assert write(model, lanes=lanes, **settings).tolist() == expected.tolist()


def test_a_dictionary_of_scores(model: Any, local: Any) -> None:
    settings = {"num_beams": 3}
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, **settings}
    ours, theirs = write(model, lanes=3, **wanted), write(local, **wanted)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for name in ("scores", "logits"):
        for one, other in zip(ours[name], theirs[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-4, atol=1e-4)
    assert ours.beam_indices.tolist() == theirs.beam_indices.tolist()
    assert model.compute_transition_scores(ours.sequences, ours.scores, ours.get("beam_indices")).shape == (5, NEW)


def test_allowed_tokens_and_criteria_by_row(model: Any, local: Any) -> None:
    def allowed(row: int, tokens: torch.Tensor) -> list[int]:
        return list(range(10 + row * 10, 20 + row * 10))

    class Even(StoppingCriteria):
        row_by_row = True

        def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return ids[:, -1] % 10 == 4

    settings = {
        "prefix_allowed_tokens_fn": allowed,
        "stopping_criteria": StoppingCriteriaList([Even()]),
        "eos_token_id": 1,
    }
    expected = write(local, **settings)
    assert write(model, lanes=3, **settings).tolist() == expected.tolist()


def shaken(model: Any, seed: int) -> Callable[[], None]:
    """Let every exchange with the swarm begin a little later, by chance. Returns what ends that."""
    background, chance = model.swarm._network_thread, random.Random(seed)
    run = background.run

    def run_late(work: Any) -> Any:
        async def late() -> Any:
            await asyncio.sleep(0.01 * chance.random())
            return await work

        return run(late())

    background.run = run_late
    return lambda: delattr(background, "run")


def test_sampled_texts_depend_on_the_seed_alone(model: Any) -> None:
    settings = {"num_beams": 2, "num_return_sequences": 2}

    def sample(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return write(model, do_sample=True, temperature=2.0, lanes=3, **settings).tolist()

    first = sample(0)
    for timing in range(2):
        calm = shaken(model, timing)
        try:
            assert sample(0) == first
        finally:
            calm()
    assert sample(1) != first


def test_the_callers_random_numbers_go_on(model: Any) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    texts = [write(model, do_sample=True, temperature=2.0, lanes=3).tolist() for _ in range(2)]
    assert texts[0] != texts[1]
    after = [torch.get_rng_state(), torch.rand(3).tolist()]
    torch.set_rng_state(before)
    for _ in range(2):
        torch.randint(2**62, (3,))  # one draw a call, whatever the lanes used
    assert torch.equal(torch.get_rng_state(), after[0])
    assert torch.rand(3).tolist() == after[1]


class Trouble(StoppingCriteria):
    """Does something in the middle of the text that contains a token, once all lanes are writing."""

    row_by_row = True

    def __init__(self, token: int, lanes: int, what: Callable[[], None]) -> None:
        self.done = False
        self._token = token
        self._lanes = lanes
        self._what = what
        self._seen: set[int] = set()

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._seen.add(threading.get_ident())
        if bool((ids == self._token).any()) and len(self._seen) == self._lanes and not self.done:
            self.done = True
            self._what()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def test_an_error_in_one_lane_ends_all_and_is_raised(model: Any) -> None:
    class Odd(SwarmError):
        pass

    def fail() -> None:
        raise Odd("this text must not be written")

    for _ in range(3):  # the sessions are closed: else there would soon be no room for more
        trouble = Trouble(20, 5, fail)
        with pytest.raises(Odd, match="must not be written"):
            write(model, lanes=5, max_new_tokens=90, stopping_criteria=StoppingCriteriaList([trouble]))
    assert write(model, lanes=5).shape == (5, LONGEST + NEW)


def test_ctrl_c_ends_all_lanes(model: Any, local: Any) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        interrupt_lanes(model)
    finally:
        signal.signal(signal.SIGINT, before)
    assert write(model, lanes=5).tolist() == write(local).tolist()


def interrupt_lanes(model: Any) -> None:
    main = threading.main_thread().ident
    assert main is not None
    for _ in range(3):
        trouble = Trouble(20, 5, lambda: signal.pthread_kill(main, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            write(model, lanes=5, max_new_tokens=90, stopping_criteria=StoppingCriteriaList([trouble]))
        assert trouble.done


def test_what_is_refused(model: Any) -> None:
    with pytest.raises(InvalidOption, match="lanes=0"):
        write(model, lanes=0)
    with model.inference_session(max_length=32), pytest.raises(UsageError, match="lanes open their own sessions"):
        write(model, lanes=2)
    with pytest.raises(UsageError, match="streamer"):
        write(model, lanes=2, streamer=object())


def test_lanes_that_do_not_fit_into_the_caches_are_refused(swarm: TestSwarm, model: Any) -> None:
    with model.inference_session(max_length=700) as session, run_client(swarm, wait_for_blocks=1.0) as other:
        session.step(model.word_embeddings(IDS[:1]))
        with pytest.raises(CacheFull, match="2 lanes are open at every server at once; fewer lanes or rows"):
            write(other, lanes=2, max_new_tokens=400)
    assert write(model, lanes=2).shape == (5, LONGEST + NEW)


@pytest.mark.slow
def test_a_lane_survives_the_loss_of_a_server(folder: Path, local: Any) -> None:
    spans = ("0:3", "3:6", "3:6")
    with run_swarm(folder, spans, dtype="float32") as swarm, run_client(swarm, dtype="float32") as model:
        with model.inference_session(max_length=8) as session:
            used = {hop.server.peer_id for hop in session.open().hops}
        victim = next(server for server in swarm.servers[1:] if server.peer_id in used)
        trouble = Trouble(20, 3, victim.kill)
        written = write(model, lanes=3, max_new_tokens=20, stopping_criteria=StoppingCriteriaList([trouble]))
        assert trouble.done
        assert written.tolist() == write(local, max_new_tokens=20).tolist()
        swarm.servers.remove(victim)


def states(lanes: int) -> list[RandomState]:
    return [RandomState(torch.device("cpu"), seed) for seed in range(lanes)]


def test_a_lane_that_waits_for_the_network_is_ended_by_another_ones_error() -> None:
    background = NetworkThread()
    cancelled = threading.Event()

    async def never() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def soon() -> None:
        await asyncio.sleep(0.01)

    ended: list[BaseException] = []

    def waits(ticket: ComputeTicket) -> None:
        try:
            with ticket:
                background.run(never())
        except BaseException as error:
            ended.append(error)
            background.run(soon())  # what a lane does at its end still works, such as closing its session
            raise

    def fails(ticket: ComputeTicket) -> None:
        with ticket:
            background.run(soon())
            raise ZeroDivisionError

    try:
        with pytest.raises(ZeroDivisionError):
            run_lanes([waits, fails, waits], states(3))
        assert cancelled.wait(60)
        assert [type(error) for error in ended] == [CancelledError] * 2
    finally:
        background.close()


def test_results_come_in_the_order_of_the_lanes() -> None:
    background = NetworkThread()

    def lane(number: int) -> Callable[[ComputeTicket], int]:
        def work(ticket: ComputeTicket) -> int:
            with ticket:
                background.run(asyncio.sleep(0.01 * (3 - number)))
            return number

        return work

    try:
        assert run_lanes([lane(number) for number in range(3)], states(3)) == [0, 1, 2]
    finally:
        background.close()
