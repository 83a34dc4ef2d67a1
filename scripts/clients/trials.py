"""Tries a Python program that speaks with gateways, and needs only that: `python trials.py PROGRAM URL MODEL ANSWER`.

Prints a line of JSON for each trial: what was tried, and why it failed (null if it did not).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)

Trial = Callable[[str, str], None]
TRIALS: dict[str, dict[str, Trial]] = {}

HELLO = "Once upon a time"
SAID = [{"role": "user", "content": HELLO}]
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Basel"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "The weather in a city.", "parameters": CITY}
ANSWER = sys.argv[4] if len(sys.argv) > 4 else ""
"""What the model says, whatever it is asked."""

FEW = 12
"""Tokens of an answer."""


def trial(program: str, what: str) -> Callable[[Trial], Trial]:
    """Adds a trial of a program. It is given the gateway's URL and the model's name, and raises if something fails."""

    def add(run: Trial) -> Trial:
        TRIALS.setdefault(program, {})[what] = run
        return run

    return add


def require(found: object) -> None:
    if not found:
        raise AssertionError("there is nothing in the answer")


@trial("openai", "chat, stream")
def _(url: str, model: str) -> None:
    client = _openai(url)
    require(client.chat.completions.create(model=model, messages=SAID, max_tokens=FEW).choices[0].message.content)
    chunks = client.chat.completions.create(model=model, messages=SAID, max_tokens=FEW, stream=True)
    require("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


@trial("openai", "tools")
def _(url: str, model: str) -> None:
    tools = [{"type": "function", "function": WEATHER}]
    asked = {"model": model, "messages": SAID, "tools": tools, "tool_choice": "required"}
    (call,) = _openai(url).chat.completions.create(**asked, parallel_tool_calls=False).choices[0].message.tool_calls
    require(json.loads(call.function.arguments)["city"] in ("Bern", "Basel"))


@trial("openai", "responses, stream")
def _(url: str, model: str) -> None:
    client = _openai(url)
    first = client.responses.create(model=model, input=HELLO, max_output_tokens=FEW)
    asked = {"model": model, "input": "And then?", "previous_response_id": first.id, "max_output_tokens": FEW}
    events = list(client.responses.create(**asked, stream=True))
    require(first.output_text and events[-1].response.output_text)


@trial("openai", "embeddings")
def _(url: str, model: str) -> None:
    require(_openai(url).embeddings.create(model=model, input=[HELLO, "The end"]).data[1].embedding)


@trial("anthropic", "messages, stream, tools")
def _(url: str, model: str) -> None:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none")
    require(client.messages.count_tokens(model=model, messages=SAID).input_tokens)
    with client.messages.stream(model=model, messages=SAID, max_tokens=FEW) as stream:
        require("".join(stream.text_stream))
    tools = [{"name": "weather", "input_schema": CITY}]
    asked = {"model": model, "messages": SAID, "max_tokens": 200, "tools": tools}
    said = client.messages.create(**asked, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    require(said.content[-1].input["city"])
    done = {"type": "tool_result", "tool_use_id": said.content[-1].id, "content": "12 degrees"}
    more = [*SAID, {"role": "assistant", "content": said.content}, {"role": "user", "content": [done]}]
    require(client.messages.create(**{**asked, "messages": more, "max_tokens": FEW}).content)


@trial("ollama", "chat, generate, stream, format, list, show")
def _(url: str, model: str) -> None:
    import ollama

    client = ollama.Client(host=url)
    require([one.model for one in client.list().models] == [model] and client.show(model).modelinfo)
    few = {"num_predict": FEW}
    require("".join(part.message.content for part in client.chat(model, SAID, stream=True, options=few)))
    require(client.generate(model, HELLO, options=few).response)
    require(json.loads(client.chat(model, SAID, format=CITY).message.content)["city"])


@trial("langchain-openai", "invoke, stream, batch of 20, structured output")
def _(url: str, model: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_tokens=FEW)
    require(chat.invoke(HELLO).content)
    require("".join(chunk.text for chunk in chat.stream(HELLO)))
    require(len(chat.batch([HELLO] * 20)) == 20)
    patient = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none")
    require(patient.with_structured_output({"title": "place", **CITY}, method="json_schema").invoke(HELLO)["city"])


@trial("langchain-openai", "embeddings")
def _(url: str, model: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    asking = OpenAIEmbeddings(model=model, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
    require(asking.embed_documents([HELLO, "The end"])[1])


@trial("langchain-anthropic", "invoke, stream, tools")
def _(url: str, model: str) -> None:
    from langchain_anthropic import ChatAnthropic

    chat = ChatAnthropic(model=model, base_url=url, api_key="none", max_tokens=200)
    require("".join(chunk.text for chunk in chat.stream(HELLO, max_tokens=FEW)))
    tool = {"name": "weather", "input_schema": CITY}
    require(chat.bind_tools([tool], tool_choice="weather").invoke(HELLO).tool_calls[0]["args"]["city"])


@trial("langchain-ollama", "invoke, stream, structured output")
def _(url: str, model: str) -> None:
    from langchain_ollama import ChatOllama

    require("".join(chunk.text for chunk in ChatOllama(model=model, base_url=url, num_predict=FEW).stream(HELLO)))
    chat = ChatOllama(model=model, base_url=url)
    require(chat.with_structured_output({"title": "place", **CITY}, method="json_schema").invoke(HELLO)["city"])


@trial("litellm", "chat, stream, tools, embeddings")
def _(url: str, model: str) -> None:
    import litellm

    to = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    require(litellm.completion(**to, messages=SAID, max_tokens=FEW).choices[0].message.content)
    require(list(litellm.completion(**to, messages=SAID, max_tokens=FEW, stream=True)))
    tools = [{"type": "function", "function": WEATHER}]
    required = litellm.completion(**to, messages=SAID, tools=tools, tool_choice="required")
    require(required.choices[0].message.tool_calls)
    require(litellm.embedding(**to, input=[HELLO]).data)


@trial("litellm", "Anthropic's and Ollama's interface")
def _(url: str, model: str) -> None:
    import litellm

    few = {"messages": SAID, "max_tokens": FEW}
    message = litellm.completion(model=f"anthropic/{model}", api_base=url, api_key="none", **few)
    require(message.choices[0].message.content)
    require(litellm.completion(model=f"ollama_chat/{model}", api_base=url, **few).choices[0].message.content)


@trial("llm", "prompt, schema, conversation")
def _(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        entry = {"model_id": "swarm", "model_name": model, "api_base": f"{url}/v1", "supports_schema": True}
        Path(home, "extra-openai-models.yaml").write_text(json.dumps([entry]))
        run = Path(sys.executable).with_name("llm")
        env = {**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"}
        for more in (["-o", "max_tokens", "12"], ["--schema", json.dumps(CITY)], ["-c", "-o", "max_tokens", "12"]):
            said = subprocess.run(
                [run, "-m", "swarm", HELLO, *more], env=env, capture_output=True, text=True, check=True
            )
            require(said.stdout.strip())


@trial("instructor", "response model")
def _(url: str, model: str) -> None:
    import instructor
    import pydantic

    class Place(pydantic.BaseModel, extra="forbid"):
        city: Literal["Bern", "Basel"]

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        asking = instructor.from_openai(_openai(url), mode=mode)
        require(asking.chat.completions.create(model=model, messages=SAID, response_model=Place).city)


@trial("pydantic-ai", "agent with a tool: chat completions, responses")
def _(url: str, model: str) -> None:
    import pydantic
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Place(pydantic.BaseModel):
        city: Literal["Bern", "Basel"]

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        asking: Any = kind(model, provider=provider)
        require(Agent(asking, output_type=Place).run_sync(HELLO).output.city)
        require(Agent(asking, output_type=NativeOutput(Place)).run_sync(HELLO).output.city)


@trial("openai-agents", "agent with a tool, and what it did handed on: responses, chat completions")
def _(url: str, model: str) -> None:
    import agents
    import openai
    import pydantic

    class Place(pydantic.BaseModel):
        city: Literal["Bern", "Basel"]

    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    seen: list[str] = []

    def weather(city: Literal["Bern", "Basel"]) -> str:
        """The weather in a city."""
        seen.append(city)
        return "12 degrees"

    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=300)
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="guide",
            instructions="Help.",
            model=kind(model=model, openai_client=client),
            tools=[agents.function_tool(weather)],
            model_settings=settings,
            tool_use_behavior="stop_on_first_tool",
        )
        first = agents.Runner.run_sync(agent, HELLO)
        plain = agent.clone(tools=[], model_settings=agents.ModelSettings(), output_type=Place)
        require(agents.Runner.run_sync(plain, [*first.to_input_list(), *SAID]).final_output.city)
    require(len(seen) == 2)


@trial("llama-index", "complete, chat, stream")
def _(url: str, model: str) -> None:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    asking = OpenAILike(model=model, api_base=f"{url}/v1", api_key="none", is_chat_model=True, max_tokens=FEW)
    require(asking.complete(HELLO).text)
    require([part.delta for part in asking.stream_chat([ChatMessage(role="user", content=HELLO)])])


@trial("dspy", "chat, responses")
def _(url: str, model: str) -> None:
    import dspy

    for kind in ("chat", "responses"):
        asking = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": FEW, "cache": False, "model_type": kind}
        require(dspy.LM(f"openai/{model}", **asking)(HELLO))


@trial("aider", "a question about a file")
def _(url: str, model: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "hello.py").write_text("print('hello')\n")
        command = [
            Path(sys.executable).with_name("aider"),
            "--model",
            f"openai/{model}",
            "--openai-api-base",
            f"{url}/v1",
        ]
        command += ["--openai-api-key", "none", "--no-git", "--yes-always", "--no-check-update", "--analytics-disable"]
        command += ["--no-show-model-warnings", "--edit-format", "ask", "--message", "What does it do?", "hello.py"]
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=300)
        require(ANSWER in said.stdout)


def _openai(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none")


def main(program: str, url: str, model: str) -> None:
    for what, run in TRIALS[program].items():
        failure = None
        try:
            run(url, model)
        except subprocess.CalledProcessError as error:
            failure = f"{error}: {error.stderr[-500:]}"
        except Exception as error:  # whatever it is, the table has to say it
            logger.exception("%s: %s", program, what)
            failure = f"{type(error).__name__}: {error}"
        print(json.dumps({"what": what, "failure": failure}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:4])
