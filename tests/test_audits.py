"""Servers that compute something else than they announce, over real processes: audits find them, and never the honest.

Every block is held by two honest servers in float16. The fraud looks quicker than both, so that it gets all the work.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from swarm.cli.__main__ import main
from swarm.client.routes.events import Audited
from swarm.data_structures import WireFormat
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.protocol import messages
from swarm.protocol.compression import decode_tensor, encode_tensor
from swarm.routing.suspicion import STRANGER
from swarm.trust.opinion_file import read_opinions
from tests.bad_peers import start_bad_server, start_fraud
from tests.disturbances import demo_prompt, greedy
from tests.swarms import ServerProcess, TestSwarm, run_client, run_swarm
from tests.waiting import wait_until

SPANS = ("0:6", "0:6", "6:12", "6:12")
FLOAT16 = {"dtype": "float16"}
NEW = 50
MOST_SESSIONS = 3
"""Sessions after which a fraud has to be found whose every session is audited."""


@pytest.fixture(scope="module")
def prompt() -> torch.Tensor:
    return demo_prompt("It was the best of times, it was the worst of times")


@pytest.fixture(scope="module")
def swarm() -> Iterator[TestSwarm]:
    with run_swarm(DEMO_FOLDER, SPANS, throughput=40.0, **FLOAT16) as swarm:
        yield swarm


def one_of_fifty(message: messages.Message) -> bool:
    return isinstance(message, messages.StepReply) and message.step == 30


def only_in_decode(message: messages.Message) -> bool:
    return isinstance(message, messages.StepReply) and message.step > 0


def a_little_larger(message: Any, payload: Any) -> Any:
    """Finite numbers that look right."""
    hidden = decode_tensor(payload, 1, len(payload) // 2, WireFormat.NONE, "float16", torch.device("cpu"))
    return message, encode_tensor(hidden * np.float32(1.6), WireFormat.NONE)


def changed_copy(folder: Path) -> Path:
    """The demo model with other weights, under its name."""
    shutil.copytree(DEMO_FOLDER, folder / DEMO_FOLDER.name)
    (file,) = (folder / DEMO_FOLDER.name).glob("*.safetensors")
    noise = torch.Generator().manual_seed(0)
    tensors = {
        name: one * (1 + 0.05 * torch.randn(one.shape, generator=noise)).to(one.dtype)
        for name, one in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})
    return folder / DEMO_FOLDER.name


def digests(swarm: TestSwarm, blocks: str) -> tuple[str, ...]:
    """What honest servers of these blocks announce."""
    with run_client(swarm) as model:
        return next(one.digests for one in model.swarm.servers() if str(one.span) == blocks)


FRAUDS: dict[str, Callable[[TestSwarm, Path], ServerProcess]] = {
    "one of fifty steps": lambda swarm, _: start_bad_server(swarm, "6:12", a_little_larger, one_of_fifty, **FLOAT16),
    "only in decode": lambda swarm, _: start_bad_server(swarm, "0:6", a_little_larger, only_in_decode, **FLOAT16),
    "4 bits": lambda swarm, _: start_fraud(swarm, "6:12", {"quantization": "none"}, quant="nf4", **FLOAT16),
    "8 bits": lambda swarm, _: start_fraud(swarm, "0:6", {"quantization": "none"}, quant="int8", **FLOAT16),
    "other weights": lambda swarm, folder: start_fraud(
        swarm, "6:12", {"digests": digests(swarm, "6:12")}, model=changed_copy(folder), **FLOAT16
    ),
}


@pytest.mark.parametrize("kind", FRAUDS)
def test_frauds_are_found(swarm, prompt, kind, tmp_path):
    fraud = FRAUDS[kind](swarm, tmp_path)
    found: list[Audited] = []
    try:
        with run_client(swarm, audit=1.0) as model:
            model.swarm.add_listener(lambda event: found.append(event) if isinstance(event, Audited) else None)
            suspicions = model.swarm._planner.router.suspicions
            for _ in range(MOST_SESSIONS):
                with model.inference_session(max_length=128) as session:
                    greedy(model, prompt, NEW)
                    used = {hop.server.peer_id for hop in session.route.hops}
                if fraud.peer_id not in used:
                    break
                wait_until(model.swarm._auditor._task.done)
            opinion = suspicions.of(fraud.peer_id, time.monotonic())
            assert opinion.differed, f"{kind} was not found: {found}"
            assert opinion.log_odds > 0
            assert fraud.peer_id not in used, "it is still used"
    finally:
        fraud.kill()
    assert all(event.agreed for event in found if event.peer_id != fraud.peer_id)


def test_what_was_learned_is_known_to_the_next_client(swarm, prompt, tmp_path):
    """A client that ends right after its only session finishes its audits. `swarm status` shows what they said."""
    fraud, path = FRAUDS["4 bits"](swarm, tmp_path), tmp_path / "opinions.json"
    try:
        with run_client(swarm, audit=0.01, opinions=path) as model:
            with model.inference_session(max_length=128) as session:
                greedy(model, prompt, NEW)
                assert fraud.peer_id in {hop.server.peer_id for hop in session.route.hops}
        known = read_opinions(path)
        assert known[fraud.peer_id].differed == 1
        assert all(one.agreed and not one.differed for peer, one in known.items() if peer != fraud.peer_id)
        with run_client(swarm, audit=0.01, opinions=path) as model, model.inference_session(max_length=128) as session:
            greedy(model, prompt, 5)
            assert fraud.peer_id not in {hop.server.peer_id for hop in session.route.hops}
        shown = CliRunner().invoke(main, ["status", "--opinions", str(path), "--initial-peers", swarm.address])
        assert "0 of 1 agree" in shown.output
        assert "1 of 1 agree" in shown.output
    finally:
        fraud.kill()


def test_honest_servers_are_not_suspected(swarm, prompt):
    """Long texts, many rows, beams and a rollback: what they did differently is within rounding."""
    found: list[Audited] = []
    with run_client(swarm, audit=1.0, wire="blockwise8") as model:
        model.swarm.add_listener(lambda event: found.append(event) if isinstance(event, Audited) else None)
        with model.inference_session(max_length=300):
            greedy(model, prompt, 40)
        wait_until(model.swarm._auditor._task.done)
    assert len(found) >= 4, "inputs are not the same when they are packed once more"
    with run_client(swarm, audit=1.0) as model:
        model.swarm.add_listener(lambda event: found.append(event) if isinstance(event, Audited) else None)
        with model.inference_session(max_length=300) as session:
            greedy(model, prompt, 40)
            session.position = prompt.shape[1]
            greedy(model, prompt, 30)
        texts = torch.cat(
            [prompt, demo_prompt("It was the age of wisdom, it was the age of folly")[:, : prompt.shape[1]]]
        )
        with model.inference_session(max_length=300):
            greedy(model, texts, 20)
        with model.inference_session(max_length=300):
            greedy(model, prompt, 20, num_beams=3)
        with model.inference_session(max_length=600):
            greedy(model, prompt.repeat(1, 20), 5)
        wait_until(model.swarm._auditor._task.done)
        odds = [model.swarm._planner.router.suspicions.of(one.peer_id, time.monotonic()).log_odds for one in found]
    assert len(found) >= 16
    assert all(event.agreed for event in found)
    assert all(one < STRANGER for one in odds)
