"""Lanes of a hand-written loop, over real server processes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.errors import InvalidOption, ServerFault, SessionClosed
from tests.swarms import run_client, run_swarm
from tests.zoo import PROMPTS

TOKENS = 6


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[Any]:
    with (
        run_swarm(folder, ("0:3", "3:6", "3:6"), dtype="float32", cache_tokens=100) as swarm,
        run_client(swarm, dtype="float32", wait_for_blocks=1.0) as model,
    ):
        yield model


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("swarm-lane")]


def continued(local: Any, text: list[int]) -> list[int]:
    written = local.generate(torch.tensor([text]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
    return written[0, len(text) :].tolist()


def test_a_loop_that_keeps_several_texts_in_flight(model: Any, local: Any) -> None:
    texts = [PROMPTS[0], PROMPTS[1], PROMPTS[0][:3]]
    with model.inference_lanes(3, max_length=24) as lanes:
        assert len(lanes) == 3
        written: list[list[int]] = [[] for _ in lanes]
        flying = [
            lane.submit(model.word_embeddings(torch.tensor([text]))) for lane, text in zip(lanes, texts, strict=True)
        ]
        for _ in range(TOKENS):
            for number, lane in enumerate(lanes):
                token = model.lm_head(flying[number].result()[:, -1:]).argmax(-1)
                written[number].append(int(token))
                flying[number] = lane.submit(model.word_embeddings(token))
    assert written == [continued(local, text) for text in texts]


def test_auto_means_one_lane_for_each_server(model: Any) -> None:
    with model.inference_lanes(max_length=8) as lanes:
        assert len(lanes) == 2
    with pytest.raises(InvalidOption, match="lanes=0"):
        model.inference_lanes(0, max_length=8)


def test_steps_of_a_lane_run_in_order_and_its_session_can_roll_back(model: Any, local: Any) -> None:
    text = PROMPTS[1]
    with model.inference_lanes(2, max_length=24) as lanes:
        parts = [lanes[0].submit(model.word_embeddings(torch.tensor([[token]]))) for token in text]
        last = parts[-1].result()
        assert lanes[0].session.position == len(text)
        lanes[0].session.position -= 1
        again = lanes[0].step(model.word_embeddings(torch.tensor([text[-1:]])))
        torch.testing.assert_close(again, last)
        assert int(model.lm_head(again)[:, -1].argmax(-1)) == continued(local, text)[0]


def test_a_failover_in_one_lane_does_not_touch_the_others(model: Any) -> None:
    embeddings = model.word_embeddings(torch.tensor([PROMPTS[0]]))
    more = model.word_embeddings(torch.tensor([PROMPTS[1]]))
    with model.inference_lanes(2, max_length=24) as lanes:
        for lane in lanes:
            lane.step(embeddings)
        chains = [lane.session._chain for lane in lanes]
        others = list(chains[1]._hops.hops)
        lost = chains[0]._hops.hops[1]
        lost.progress.on_failed(ServerFault("made up by this test"))
        first, second = [lane.submit(more) for lane in lanes]
        torch.testing.assert_close(first.result(), second.result(), rtol=1e-4, atol=1e-4)
        assert chains[0]._hops.hops[1] is not lost
        assert list(chains[1]._hops.hops) == others


def test_closing_cancels_running_steps(model: Any) -> None:
    embeddings = model.word_embeddings(torch.tensor([PROMPTS[0][:1]]))
    with model.inference_lanes(1, max_length=30) as lanes:
        flying = [lanes[0].submit(embeddings) for _ in range(20)]
    assert any(isinstance(future.exception(), CancelledError) for future in flying if not future.cancelled()) or any(
        future.cancelled() for future in flying
    )
    with pytest.raises(SessionClosed):
        lanes[0].submit(embeddings)
