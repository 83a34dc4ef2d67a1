"""Early exit over HTTP: OpenAI's client, a gateway with lenses, and three real servers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from swarm import EarlyExit
from swarm.errors import AdapterMismatch
from swarm.gateway.settings import GatewaySettings
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.gateways import GatewayProcess, run_gateway
from tests.swarms import TestSwarm, run_client, run_swarm
from tests.waiting import wait_until

PROMPT = "Once upon a time"
ALWAYS = {"threshold": 0}
LENGTH = 24


@pytest.fixture(scope="module")
def exits(swarm: TestSwarm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exits")
    text = (DEMO_FOLDER.parents[2] / "README.md").read_text()
    tokens = torch.tensor(load_tokenizer(DEMO_FOLDER).encode(text))
    with run_client(swarm) as model:
        model.train_exits([tokens])
        model.save_exits(folder)
    return folder


@pytest.fixture(scope="module")
def gateway(swarm: TestSwarm, exits: Path) -> Iterator[GatewayProcess]:
    """Lets tokens leave in requests that ask, even unverified."""
    with run_gateway(swarm, settings=GatewaySettings(approximate_exits=True), exits=[exits]) as running:
        yield running


@pytest.fixture(scope="module")
def client(gateway: GatewayProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0, timeout=300) as made:
        yield made


def ask(client: openai.OpenAI, early_exit: Any = None, **options: Any) -> Any:
    extra = {} if early_exit is None else {"early_exit": early_exit}
    if "top_k" in options:
        extra["top_k"] = options.pop("top_k")
    messages = [{"role": "user", "content": PROMPT}]
    options = {"max_tokens": LENGTH, "temperature": 0, **options}
    return client.chat.completions.create(model="demo", messages=messages, extra_body=extra, **options)


def done(client: openai.OpenAI, early_exit: Any, **options: Any) -> dict[str, Any]:
    """The detail of kind `done`."""
    reply = ask(client, early_exit, extra_headers={"X-Swarm-Details": "1"}, **options)
    detail: dict[str, Any] = reply.swarm[-1]
    assert detail["kind"] == "done"
    return detail


def taken(detail: dict[str, Any]) -> int:
    return sum(boundary["taken"] for boundary in detail["early_exit"]["exits"])


SETTINGS = [
    {},
    {"temperature": 1.0, "seed": 7, "n": 3},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "seed": 8, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    {"temperature": 1.0, "seed": 9, "response_format": {"type": "json_object"}},
    {"stop": [" she", "."]},
]


def streamed(gateway: GatewayProcess, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The chunks and details of a streamed completion."""
    headers = {"X-Swarm-Details": "1"}
    with httpx.stream("POST", f"{gateway.api}/completions", json=asked, headers=headers, timeout=300) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


EXITS = [ALWAYS, {"threshold": 0.3}, {"confidence": "similarity", "threshold": 0.5}]


@pytest.mark.parametrize(("settings", "exit_options"), list(zip(SETTINGS, [*EXITS, ALWAYS, ALWAYS], strict=True)))
def test_verified_answers_are_those_without_exits(client, settings, exit_options):
    plain, early = ask(client, **settings), ask(client, exit_options, **settings)
    assert [choice.message.content for choice in early.choices] == [choice.message.content for choice in plain.choices]
    assert [choice.finish_reason for choice in early.choices] == [choice.finish_reason for choice in plain.choices]
    assert early.usage == plain.usage


def test_provisional_text_is_in_events_of_its_own(gateway):
    """As a reader shows it: each event replaces the provisional text, and each chunk of the answer ends it."""
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": LENGTH, "temperature": 0, "stream": True}
    asked = {**body, "early_exit": {**ALWAYS, "provisional": True}}
    plain = httpx.post(f"{gateway.api}/completions", json={**body, "stream": False}, timeout=300).json()
    shown: list[str] = []

    def has_shown() -> bool:
        """Where this process is slow, answers come before it can look."""
        shown.clear()
        text, provisional = "", ""
        for event in streamed(gateway, asked):
            if "choices" in event:
                text, provisional = text + event["choices"][0]["text"], ""
            elif event["kind"] == "provisional":
                assert event["index"] == 0
                provisional = event["text"]
                shown.append(provisional)
        assert text == plain["choices"][0]["text"]
        assert not provisional
        return bool(shown)

    wait_until(has_shown)
    refused = httpx.post(f"{gateway.api}/completions", json=asked, timeout=300)
    assert refused.status_code == 400, "clients that do not ask for details would see none"
    assert refused.json()["error"]["param"] == "early_exit.provisional"


def test_log_probabilities_are_the_full_models(client):
    asked = {"logprobs": True, "top_logprobs": 3, "temperature": 1.0, "seed": 5}
    plain, early = (ask(client, *how, **asked).choices[0].logprobs.content for how in ([], [ALWAYS]))
    assert [one.token for one in early] == [one.token for one in plain]
    for ours, theirs in zip(early, plain, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        assert [one.token for one in ours.top_logprobs] == [one.token for one in theirs.top_logprobs]


def test_details_and_metrics_say_what_left(client, gateway):
    """Where this process is slow, answers come before it can look."""
    detail: dict[str, Any] = {}

    def has_left() -> bool:
        detail.update(done(client, ALWAYS))
        return taken(detail) > 0

    wait_until(has_left)
    assert detail["early_exit"]["approximate"] is False
    boundaries = detail["early_exit"]["exits"]
    assert {boundary["block"] for boundary in boundaries} <= {4, 8}
    assert all(one["taken"] >= one["stood"] + one["given_up"] for one in boundaries)
    assert gateway.metric("swarm_client_exits_total") > 0
    assert gateway.metric("swarm_client_exits_verified_total") > 0
    assert "early_exit" not in done(client, None)


def test_unverified_answers_are_marked(client):
    detail = done(client, {**ALWAYS, "verify": False})
    assert detail["early_exit"]["approximate"] is True
    assert detail["early_exit"]["exits"] == [{"block": 4, "taken": LENGTH - 1, "stood": 0, "given_up": 0}]


def test_what_is_refused(client, swarm):
    with pytest.raises(openai.BadRequestError, match="no classifiers for demo"):
        ask(client, {"confidence": "classifier"})
    with pytest.raises(openai.BadRequestError, match=r"early_exit\.beams is not supported"):
        ask(client, {"beams": 3})
    with run_gateway(swarm) as strict, openai.OpenAI(base_url=strict.api, api_key="none", max_retries=0) as other:
        with pytest.raises(openai.BadRequestError, match="which this gateway does not allow") as caught:
            ask(other, {"verify": False})
        assert caught.value.code == "approximate_not_allowed"
        assert ask(other, ALWAYS).choices[0].message.content == ask(client).choices[0].message.content


def test_classifiers_for_other_blocks_than_the_routes_are_no_error(swarm, tmp_path):
    """The servers may have moved since the classifiers were trained: no token leaves, and requests are answered."""
    with run_client(swarm) as model:
        tokens = torch.tensor(load_tokenizer(DEMO_FOLDER).encode(PROMPT * 40))
        model.train_exits([tokens], kind="classifier", boundaries=[6])
        model.save_exits(tmp_path)
    settings = GatewaySettings(early_exit=EarlyExit("classifier", 0.0))
    with (
        run_gateway(swarm, settings=settings, exits=[tmp_path]) as gateway,
        openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0, timeout=300) as client,
    ):
        asked = {"temperature": 1.0, "seed": 3, "logprobs": True}
        ours, plain = (ask(client, *how, **asked).choices[0] for how in ([], [False]))
        assert ours.message.content == plain.message.content
        assert [one.token for one in ours.logprobs.content] == [one.token for one in plain.logprobs.content]
        assert taken(done(client, None)) == 0


@pytest.mark.slow
def test_the_operators_default_and_a_server_that_dies(exits):
    """The text goes on, with the same seed to the same end."""
    settings = GatewaySettings(early_exit=EarlyExit(threshold=0.0))
    spans = ("0:4", "4:8", "8:12", "4:8")
    with run_swarm(DEMO_FOLDER, spans) as swarm, run_gateway(swarm, settings=settings, exits=[exits]) as gateway:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 120, "temperature": 1, "seed": 4}
        plain = httpx.post(f"{gateway.api}/completions", json={**body, "early_exit": False}, timeout=300).json()
        events: list[dict[str, Any]] = []
        text, killed = "", False
        asked = {**body, "stream": True}
        for event in streamed(gateway, asked):
            if "kind" in event:
                events.append(event)
                continue
            text += event["choices"][0]["text"]
            if len(text) > 40 and not killed:
                killed = True
                used = next(one for one in events if one["kind"] == "route")["hops"][1]["peer"]
                next(s for s in swarm.servers if s.peer_id.endswith(used.removeprefix("…"))).kill()
        assert text == plain["choices"][0]["text"]
        assert [one["kind"] for one in events].count("lost") == 1
        assert taken(events[-1]) > 0


def test_a_models_own_settings_may_rule_out_the_operators_default(swarm, tmp_path):
    """Requests that did not ask for exits are answered without; those that did are refused."""
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "demo", ignore=shutil.ignore_patterns("*.png", "*.md"))
    own = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**own, "guidance_scale": 1.5}))
    settings = GatewaySettings(early_exit=EarlyExit(threshold=0.0))
    with (
        run_gateway(swarm, [folder], settings=settings) as gateway,
        openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0, timeout=300) as client,
    ):
        found = ask(client).choices[0].message.content
        assert found
        assert found == ask(client, False).choices[0].message.content
        assert taken(done(client, None)) == 0
        with pytest.raises(openai.BadRequestError, match="UnbatchedClassifierFreeGuidanceLogitsProcessor") as caught:
            ask(client, True)
        assert caught.value.param == "early_exit"


@pytest.mark.slow
def test_exits_that_fit_no_model_stop_the_gateway(swarm, exits, tmp_path):
    other = (exits / "exits.safetensors").read_bytes()
    revision = json.loads(other[8 : 8 + int.from_bytes(other[:8], "little")])["__metadata__"]["revision"]
    (tmp_path / "exits.safetensors").write_bytes(other.replace(revision.encode(), b"0" * len(revision)))
    with pytest.raises(AdapterMismatch, match="train exits for it"), run_gateway(swarm, exits=[tmp_path]):
        pass


def test_a_prompt_has_the_same_scores(client):
    """They come from the whole model, and tokens of the answer still leave early."""

    def scores(early_exit: Any) -> list[float]:
        reply = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=4, echo=True, logprobs=1, extra_body={"early_exit": early_exit}
        )
        return reply.choices[0].logprobs.token_logprobs[1:5]

    plain = scores(False)
    for early_exit in ({"threshold": 0.1}, {"threshold": 0.1, "verify": False, "fill": "project"}):
        assert scores(early_exit) == pytest.approx(plain, abs=1e-4)
