"""OpenAI's own client, and LangChain's, against a gateway of a real three-server swarm."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import langchain_openai
import openai
import pytest
import torch

from swarm import NetworkOptions
from swarm.models.checkpoints.checkpoint import DEMO_FOLDER
from swarm.models.checkpoints.partial_loading import load_local_model
from swarm.models.tokenizers.tokenizer import load_tokenizer
from tests.gateways import GatewayProcess, metric_at, run_gateway
from tests.swarms import TestSwarm, run_swarm
from tests.waiting import wait_until

MODEL = "demo"
PROMPT = "Once upon a time"
SPANS = ("0:4", "4:8", "8:12")


@pytest.fixture(scope="module")
def client(gateway):
    with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0, timeout=300) as made:
        yield made


@pytest.fixture(scope="module")
def local_scores():
    """The log probabilities `[tokens - 1, vocabulary]` of the tokens behind each one, by the model without a swarm."""
    model = load_local_model(DEMO_FOLDER)

    def scores(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1].float(), dim=-1)

    return scores


@pytest.fixture(scope="module")
def local():
    """The text of the model without a swarm: greedy, this many new tokens after a prompt."""
    model, tokenizer = load_local_model(DEMO_FOLDER), load_tokenizer(DEMO_FOLDER)

    def continued(prompt: str, tokens: int) -> str:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
        return str(tokenizer.decode(output[0], skip_special_tokens=True))[len(prompt) :]

    return continued


def as_chat(text: str) -> str:
    """The prompt that the model's chat template makes of a message."""
    messages = [{"role": "user", "content": text}]
    prompt = load_tokenizer(DEMO_FOLDER).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return str(prompt)


def ask(client: openai.OpenAI, prompt: str = PROMPT, **options: Any) -> Any:
    options = {"max_tokens": 16, "temperature": 0, **options}
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": prompt}], **options)


def text_of(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def is_idle(gateway: GatewayProcess) -> bool:
    return gateway.metric("swarm_gateway_running") == 0


def test_models(client):
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len, model.context_length) == (MODEL, 1024, 1024)
    assert client.models.retrieve(MODEL).swarm == {
        "chat_template": True,
        "tools": True,
        "embeddings": "mean",
        "context_length": 1024,
        "blocks": 12,
    }
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served here; this gateway has demo"):
        client.models.retrieve("gpt")


def test_an_answer_is_the_local_models(client, local):
    reply = ask(client)
    (choice,) = reply.choices
    assert choice.message.content == local(as_chat(PROMPT), 16)
    assert (choice.finish_reason, choice.message.role, reply.model) == ("length", "assistant", MODEL)
    assert re.fullmatch("fp_[0-9a-f]{10}", reply.system_fingerprint)
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (20, 16, 36)


def test_a_stream_is_the_same_text(client, local):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == local(as_chat(PROMPT), 16)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 16
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_seed_says_the_same_again(client):
    def sampled(seed: int, **more: Any) -> list[str]:
        return [one.message.content for one in ask(client, temperature=1.0, seed=seed, **more).choices]

    first = sampled(7, n=3)
    assert len(set(first)) == 3
    assert sampled(7, n=3) == first
    assert sampled(7) == first[:1]
    assert sampled(8) != first[:1]


def test_many_at_once_get_their_own_answers(client, local):
    prompts = [f"{PROMPT}, {word}" for word in ("a wolf", "the king", "an old man", "two cats", "his sister", "we")]
    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(lambda prompt: text_of(ask(client, prompt, stream=True)), prompts))
    assert found == [local(as_chat(prompt), 16) for prompt in prompts]


def test_stops(client, local):
    text = local(as_chat(PROMPT), 16)
    stop = text[20:24]
    reply = ask(client, stop=[stop, "§"]).choices[0]
    assert reply.message.content == text[: text.index(stop)]
    assert reply.finish_reason == "stop"
    assert text_of(ask(client, stop=stop, stream=True)) == text[: text.index(stop)]


def test_logprobs(client):
    reply = ask(client, logprobs=True, top_logprobs=3, max_tokens=4).choices[0]
    assert "".join(one.token for one in reply.logprobs.content) == reply.message.content
    for one in reply.logprobs.content:
        assert one.top_logprobs[0].logprob == one.logprob <= 0  # greedy: the likeliest is taken
        assert len(one.top_logprobs) == 3
        assert bytes(one.bytes).decode() == one.token
    streamed = [
        one
        for chunk in ask(client, logprobs=True, max_tokens=4, stream=True)
        if chunk.choices[0].logprobs
        for one in chunk.choices[0].logprobs.content
    ]
    assert [one.token for one in streamed] == [one.token for one in reply.logprobs.content]


def test_penalties_and_bias_change_the_text(client, local):
    assert ask(client, presence_penalty=2, frequency_penalty=2, max_tokens=40).choices[0].message.content != local(
        as_chat(PROMPT), 40
    )
    assert ask(client, logit_bias={"11": 100}, max_tokens=3).choices[0].message.content != local(as_chat(PROMPT), 3)


def test_completions(client, local):
    reply = client.completions.create(model=MODEL, prompt=[PROMPT, "The king"], max_tokens=8, temperature=0, echo=True)
    assert [one.text for one in reply.choices] == [PROMPT + local(PROMPT, 8), "The king" + local("The king", 8)]
    chunks = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, stream=True, logprobs=1)
    texts, offsets = "", []
    for chunk in chunks:
        texts += chunk.choices[0].text
        offsets += chunk.choices[0].logprobs.text_offset if chunk.choices[0].logprobs else []
    assert texts == local(PROMPT, 8)
    assert offsets == sorted(offsets)
    assert len(offsets) == 8


def test_log_probabilities_of_a_prompt_are_the_local_models(client, local_scores):
    """As lm_eval asks for them: multiple choice with one new token, and perplexity with tokens instead of a text."""
    for new in [0, 1]:
        for stream in [False, True]:
            tokenizer = load_tokenizer(DEMO_FOLDER)
            prompts = [tokenizer(text)["input_ids"] for text in (PROMPT + ", a wolf. " * 40, "The king")]
            asked = client.completions.create(
                model=MODEL, prompt=prompts, max_tokens=new, temperature=0, logprobs=2, echo=True, stream=stream
            )
            texts, found = ["", ""], [[], []]
            for part in asked if stream else [asked]:
                for choice in part.choices:
                    texts[choice.index] += choice.text
                    if choice.logprobs:
                        read = choice.logprobs
                        found[choice.index] += zip(
                            read.tokens, read.token_logprobs, read.top_logprobs, read.text_offset, strict=True
                        )
            for prompt, text, read in zip(prompts, texts, found, strict=True):
                scores = local_scores(prompt)
                assert text.startswith(tokenizer.decode(prompt))
                assert len(read) == len(prompt) + new
                assert read[0][1:3] == (None, None)
                for token, (shown, logprob, top, offset), row in zip(prompt[1:], read[1:], scores, strict=False):
                    assert logprob == pytest.approx(float(row[token]), abs=1e-3)
                    assert text[offset:].startswith(shown)
                    assert top[shown] == logprob
                    assert max(top.values()) == pytest.approx(float(row.max()), abs=1e-3)
                    assert 2 <= len(top) <= 3


def test_tokens_of_texts(gateway, client):
    tokenizer = load_tokenizer(DEMO_FOLDER)
    tokens = tokenizer(PROMPT)["input_ids"]

    def post(path: str, **body: Any) -> Any:
        return httpx.post(gateway.url + path, json=body).json()

    for prefix in ("", "/v1"):
        assert post(f"{prefix}/tokenize", model=MODEL, prompt=PROMPT) == {
            "count": len(tokens), "max_model_len": 1024, "tokens": tokens, "token_strs": None
        }  # fmt: skip
        assert post(f"{prefix}/detokenize", tokens=tokens) == {"prompt": PROMPT}
    asked = post("/tokenize", messages=[{"role": "user", "content": PROMPT}], return_token_strs=True)
    assert asked["tokens"] == tokenizer(as_chat(PROMPT))["input_ids"]
    assert asked["token_strs"] == tokenizer.convert_ids_to_tokens(asked["tokens"])
    info = httpx.get(f"{gateway.url}/tokenizer_info").json()
    assert (info["model"], info["eos_token"], info["vocab_size"]) == (MODEL, tokenizer.eos_token, 2048)
    for path, body, status in (
        ("/detokenize", {"tokens": [2048]}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {}, 400),
        ("/tokenize", {"model": "gpt", "prompt": "a"}, 404),
    ):
        assert httpx.post(gateway.url + path, json=body).status_code == status


def test_refusals_have_their_class(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, max_tokens=-2)
    assert (caught.value.param, caught.value.body["message"]) == ("max_tokens", "Expected `int` >= -1, at `max_tokens`")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, max_tokens=2000)
    assert caught.value.code == "context_length_exceeded"
    assert "which leaves room for 1004 more; 2000 were requested" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "a"}])


@pytest.mark.slow
def test_a_client_that_leaves_frees_its_session(client, gateway, swarm):
    with ask(client, max_tokens=1000, stream=True) as chunks:
        for _, chunk in zip(range(3), chunks, strict=False):
            assert chunk.choices
        assert not is_idle(gateway)
    wait_until(lambda: is_idle(gateway))
    with pytest.raises(openai.APITimeoutError):
        ask(client.with_options(timeout=0.3), max_tokens=1000)
    wait_until(lambda: is_idle(gateway))
    for server in swarm.working():
        wait_until(lambda server=server: metric_at(server.metrics_url, "swarm_server_sessions_open") == 0)


def test_details_are_sent_only_on_request(gateway):
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 4, "stream": True}
    url = f"{gateway.api}/chat/completions"
    assert "event: swarm" not in httpx.post(url, json=body).text
    events = httpx.post(url, json=body, headers={"X-Swarm-Details": "1"}).text.split("\n\n")
    told = [json.loads(event.partition("data: ")[2]) for event in events if event.startswith("event: swarm")]
    assert [one["kind"] for one in told] == ["route", "done"]
    assert [hop["blocks"] for hop in told[0]["hops"]] == list(SPANS)
    assert told[1]["tokens"] == 4
    whole = httpx.post(url, json={**body, "stream": False}, headers={"X-Swarm-Details": "1"}).json()
    assert [one["kind"] for one in whole["swarm"]] == ["route", "done"]


def test_langchain_sends_twenty_prompts_in_one_request(gateway, local):
    prompts = [f"{PROMPT}, number {number}" for number in range(20)]
    writer = langchain_openai.OpenAI(base_url=gateway.api, api_key="none", model=MODEL, temperature=0, max_tokens=3)
    found = writer.generate(prompts)
    assert [one.text for (one,) in found.generations] == [local(prompt, 3) for prompt in prompts]
    assert found.llm_output["token_usage"]["completion_tokens"] == 60


def test_a_request_has_a_name_that_its_answer_carries(client, gateway):
    assert ask(client, max_tokens=1)._request_id.startswith("req_")
    assert ask(client, max_tokens=1, extra_headers={"X-Request-Id": "my-1"})._request_id == "my-1"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, max_tokens=-2)
    assert caught.value.request_id.startswith("req_")
    assert httpx.get(f"{gateway.url}/", headers={"X-Request-Id": "a b"}).headers["x-request-id"].startswith("req_")


def test_addresses_with_a_slash_at_their_end(client, gateway):
    assert httpx.get(f"{gateway.api}/models/").json() == httpx.get(f"{gateway.api}/models").json()
    for address in (gateway.api, f"{gateway.api}/"):
        assert "/v1/chat/completions" in httpx.get(address).json()["data"]


def test_health(gateway):
    assert httpx.get(f"{gateway.url}/healthz").json() == {"status": "ok"}
    assert httpx.get(f"{gateway.url}/readyz").json() == {"status": "ready"}


def test_a_server_killed_in_mid_stream_is_only_a_pause(local):
    with run_swarm(DEMO_FOLDER, ("0:6", "6:12", "6:12")) as swarm, run_gateway(swarm) as gateway:
        body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 60, "temperature": 0}
        text, told = "", []
        with httpx.stream(
            "POST", f"{gateway.api}/chat/completions", json={**body, "stream": True}, headers={"X-Swarm-Details": "1"}
        ) as reply:
            for line in reply.iter_lines():
                event = json.loads(line[6:]) if line.startswith("data: {") else {}
                if "kind" in event:
                    told.append(event)
                for choice in event.get("choices", ()):
                    text += choice["delta"].get("content", "")
                    if len(told) == 1 and len(text) > 20:
                        kill(swarm, told[0]["hops"][1]["peer"])
                        told.append({"kind": "killed"})
        assert text == local(as_chat(PROMPT), 60)
        assert [one["kind"] for one in told] == ["route", "killed", "lost", "recovered", "route", "done"]
        assert told[2]["blocks"] == "6:12"
        assert gateway.metric("swarm_client_failover_seconds_count") == 1


def kill(swarm: TestSwarm, short_id: str) -> None:
    """As in a power cut."""
    next(server for server in swarm.working() if server.peer_id.endswith(short_id[1:])).kill()


@pytest.mark.slow
def test_missing_blocks_are_reported_until_they_are_back():
    with (
        run_swarm(DEMO_FOLDER, ("0:6", "6:12")) as swarm,
        run_gateway(swarm, network=NetworkOptions(wait_for_blocks=1.0)) as gateway,
    ):
        with openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as client:
            ask(client)
            swarm.holders("6:12")[0].stop()
            with pytest.raises(openai.InternalServerError) as caught:
                ask(client)
            assert (caught.value.status_code, caught.value.code) == (503, "blocks_missing")
            assert caught.value.response.headers["Retry-After"] == "10"
            with pytest.raises(openai.APIError, match="blocks 6:12 are missing") as told:
                list(ask(client, stream=True))  # which has begun while the gateway waited for them
            assert told.value.code == "blocks_missing"
            wait_until(lambda: httpx.get(f"{gateway.url}/readyz").status_code == 503)
            swarm.start("6:12").wait_ready()
            wait_until(lambda: httpx.get(f"{gateway.url}/readyz").status_code == 200)
            ask(client)


def test_a_gateway_that_shuts_down_ends_its_streams(swarm):
    with run_gateway(swarm) as gateway, openai.OpenAI(base_url=gateway.api, api_key="none", max_retries=0) as client:
        begun = threading.Event()

        def read() -> None:
            for _ in ask(client, max_tokens=1000, stream=True):
                begun.set()

        def read_to_the_end() -> None:
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                read()

        reader = threading.Thread(target=read_to_the_end)
        reader.start()
        assert begun.wait(60)
        gateway.stop()
        reader.join(60)
        assert not reader.is_alive()
