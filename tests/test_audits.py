"""Servers that compute something else than they announce, over real processes: audits find them, and never the honest.

Every block is held by two honest servers in float16. The fraud looks quicker than both, so that it gets all the work.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
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


def in_every_step(message: messages.Message) -> bool:
    return isinstance(message, messages.StepReply)


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


def test_a_witness_that_lies_is_found_itself(swarm, prompt):
    """It is too slow to get work. Whoever it is asked about is not blamed, because another one is asked as well."""
    liar = start_bad_server(swarm, "6:12", a_little_larger, in_every_step, throughput=0.5, **FLOAT16)
    found: list[Audited] = []
    try:
        with run_client(swarm, audit=1.0) as model:
            model.swarm.add_listener(lambda event: found.append(event) if isinstance(event, Audited) else None)
            for _ in range(20):
                with model.inference_session(max_length=128) as session:
                    greedy(model, prompt, 10)
                    assert liar.peer_id not in {hop.server.peer_id for hop in session.route.hops}
                wait_until(model.swarm._auditor._task.done)
                if any(event.peer_id == liar.peer_id for event in found):
                    break
            assert model.swarm.opinions()[liar.peer_id].differed
    finally:
        liar.kill()
    assert all(event.agreed == (event.peer_id != liar.peer_id) for event in found)


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


ONE_TEXT = """
import sys
import torch
from swarm import AutoDistributedModelForCausalLM, NetworkOptions
from swarm.client.audits import auditor

auditor.CLOSE_TIMEOUT_S = 60.0  # on a busy machine, not all are done in five seconds
network = NetworkOptions(opinions=sys.argv[2])
model = AutoDistributedModelForCausalLM.from_pretrained(sys.argv[3], initial_peers=[sys.argv[1]], network=network)
model.generate(torch.tensor([[5, 6, 7, 8]]), max_new_tokens=30)
"""


def test_a_program_that_ends_after_one_text_has_it_audited(swarm, tmp_path):
    """It leaves to the interpreter's end what is to be closed, when no thread can be started any more."""
    path = tmp_path / "opinions.json"
    command = [sys.executable, "-c", ONE_TEXT, swarm.address, str(path), str(DEMO_FOLDER)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert [(one.agreed, one.differed) for one in read_opinions(path).values()] == [(1, 0)] * 4


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
