"""Pages of other sites, large requests and hostile chat templates, against a gateway that others use meanwhile."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from swarm.data_structures import Span
from swarm.gateway.app import make_app
from swarm.gateway.gateway_state import GatewayState
from swarm.gateway.settings import GatewaySettings
from swarm.generation.served_model import ServedModel
from swarm.metrics.registry import new_registry
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from tests.gateways import GatewayProcess, run_gateway
from tests.models.tokenizers.prompts_here import prompts_here
from tests.swarms import TestSwarm, run_swarm

BODY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
TIMEOUT_S = 60.0
HOSTILE_TEMPLATE = (
    "{% if messages[0].content == 'loop' %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


@pytest.fixture(scope="module")
def swarm() -> Iterator[TestSwarm]:
    with run_swarm(DEMO_FOLDER, ("0:12",)) as running:
        yield running


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(DEMO_FOLDER, tmp_path_factory.mktemp("models") / "hostile")
    (folder / "chat_template.jinja").write_text(HOSTILE_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def gateway(swarm: TestSwarm, hostile: Path) -> Iterator[GatewayProcess]:
    """A gateway of two models, one of them a stranger's."""
    with run_gateway(swarm, [DEMO_FOLDER, hostile]) as running:
        yield running


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def story(gateway: GatewayProcess) -> str:
    """What the honest bystander gets."""
    return text_of(httpx.post(f"{gateway.api}/completions", json=BODY, timeout=TIMEOUT_S))


@pytest.mark.slow
@pytest.mark.parametrize("origin", ["https://else.where", "null", "http://127.0.0.1:1"])
def test_a_page_of_another_site_in_a_browser_that_does_not_say_so(gateway, story, origin):
    """At a254ca2 the gateway computed for any page whose browser sends no `Sec-Fetch-Site`: old ones, and all of them
    where the gateway is reached over plain HTTP in a local network. They all send `Origin`. Tried there: each of these
    three got status 200 and the bystander's text."""
    attack = httpx.post(
        f"{gateway.api}/completions",
        content=json.dumps(BODY),
        headers={"Content-Type": "text/plain", "Origin": origin},
        timeout=TIMEOUT_S,
    )
    assert (attack.status_code, attack.json()["error"]["code"]) == (403, "wrong_origin")
    own = httpx.post(f"{gateway.api}/completions", json=BODY, headers={"Origin": gateway.url}, timeout=TIMEOUT_S)
    assert text_of(own) == story


class Command:
    """A gateway that was started on the command line, for all addresses of this machine."""

    def __init__(self, swarm: TestSwarm, *options: str) -> None:
        command = [sys.executable, "-m", "swarm.gateway", str(DEMO_FOLDER), "--host", "0.0.0.0", "--port", "0"]
        command += ["--initial-peers", *swarm.addresses, "--wire", "none", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if "interface: http" in line:
                break

    @property
    def port(self) -> int | None:
        """None if it did not start."""
        found = [line for line in self.lines if "interface: http" in line]
        return int(found[0].rpartition(":")[2].partition("/")[0]) if found else None

    def stop(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=TIMEOUT_S)


@pytest.mark.slow
def test_everybody_in_the_network_uses_a_gateway_whose_owner_did_not_mean_that(swarm):
    """At a254ca2 a gateway on all addresses started without keys, with a line in its log, and answered anybody. Tried
    there: the line was "Everyone who can reach 0.0.0.0 may use this gateway: give it --keys", and a request without a
    key got status 200 and a text."""
    command = Command(swarm)
    try:
        assert command.port is None
        assert "give it --keys" in "".join(command.lines)
        assert "--open" in "".join(command.lines)
    finally:
        command.stop()


@pytest.mark.slow
def test_a_name_that_is_pointed_at_a_gateway_in_the_local_network(swarm, story):
    """At a254ca2 only gateways on loopback looked at `Host`; at others, a page whose name its owner points at the
    gateway's address (DNS rebinding) was the gateway's own. Tried there: `Host` and `Origin` of evil.example got status
    200 and a text."""
    command = Command(swarm, "--open", "--host-name", "chat.example")
    try:
        url = f"http://127.0.0.1:{command.port}/v1/completions"
        own = {"Host": f"evil.example:{command.port}", "Origin": f"http://evil.example:{command.port}"}
        attack = httpx.post(url, json=BODY, headers=own, timeout=TIMEOUT_S)
        assert (attack.status_code, attack.json()["error"]["code"]) == (403, "wrong_host")
        assert text_of(httpx.post(url, json=BODY, timeout=TIMEOUT_S)) == story
        named = {"Host": "chat.example", "Origin": "https://chat.example"}
        assert text_of(httpx.post(url, json=BODY, headers=named, timeout=TIMEOUT_S)) == story
    finally:
        command.stop()


@pytest.mark.slow
def test_a_chat_template_that_never_ends(gateway, story):
    """At a254ca2 four requests to a stranger's model whose template loops kept all four threads that make prompts, for
    ever: no request to any model of the gateway was answered again. Tried there: neither the six attacks nor the
    bystander of the other model had an answer after 90 s."""
    body = {"model": "hostile", "messages": [{"role": "user", "content": "loop"}], "max_tokens": 4}
    with ThreadPoolExecutor(6) as pool:
        url = f"{gateway.api}/chat/completions"
        attacks = [pool.submit(httpx.post, url, json=body, timeout=3 * TIMEOUT_S) for _ in range(6)]
        assert text_of(httpx.post(f"{gateway.api}/completions", json=BODY, timeout=3 * TIMEOUT_S)) == story
        for attack in attacks:
            assert attack.result().status_code == 400
            assert "cannot make a prompt of this" in attack.result().json()["error"]["message"]


class SlowTokenizer:
    """Makes tokens once it is let go, as for long texts."""

    bos_token_id = None
    chat_template = None

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        self.go.wait(TIMEOUT_S)
        return {"input_ids": [1] * 10_000}


def test_large_requests_that_wait_for_a_thread():
    """At a254ca2 a body gave its room back as soon as it was read: 200 requests of 2 MiB, and up to 2,000, waited for
    the threads outside of it. Now what waits is charged, and the others are told to come again."""
    tokenizer = SlowTokenizer()
    usual = SimpleNamespace(temperature=None, top_p=None, top_k=None, eos_token_id=None)
    config = SimpleNamespace(max_position_embeddings=100, vocab_size=100)
    swarm = SimpleNamespace(add_listener=lambda listener: None, servers=list, span=Span(0, 4), close=lambda: None)
    model = SimpleNamespace(swarm=swarm, config=config, generation_config=usual)
    state = GatewayState(
        [ServedModel("m", model, tokenizer, prompts_here(tokenizer))], GatewaySettings(), None, new_registry()
    )
    app = make_app(state)

    async def work() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=None) as client:
            large = json.dumps({"model": "m", "prompt": "a" * (2 * 2**20 - 1000)}).encode()
            sent = [asyncio.create_task(client.post("/v1/completions", content=large)) for _ in range(200)]
            while not any(task.done() for task in sent) and len(asyncio.all_tasks()) < 200:
                await asyncio.sleep(0)
            for _ in range(2000):
                await asyncio.sleep(0)
            refused = [task for task in sent if task.done()]
            bystander = asyncio.create_task(client.get("/healthz"))
            assert (await bystander).status_code == 200
            tokenizer.go.set()
            return [len(refused), *(task.result().status_code for task in (await asyncio.wait(sent))[0])]

    refused, *statuses = asyncio.run(work())
    state.close()
    assert refused >= 150
    assert statuses.count(503) == refused
    assert statuses.count(400) == 200 - refused  # too long for the context, once they have their tokens
