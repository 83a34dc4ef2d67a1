"""What clients may ask, checked. The types and ranges are the schema; fields of OpenAI's that mean nothing here pass.

What would change the answer and is not done here is refused by name, so that nobody gets another answer than asked for.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from swarm.gateway.failures import BadRequest

MAX_CHOICES = 8
MAX_STOPS = 16
MAX_MESSAGES = 4096
MAX_TOOLS = 128

Count = Annotated[int, Meta(ge=1, le=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
Bias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]


class StreamOptions(Struct):
    """What else a stream tells."""

    include_usage: bool = False


class FunctionCall(Struct):
    """A function that the model called."""

    name: str
    arguments: str = "{}"


class SentToolCall(Struct):
    """A call in the conversation so far."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class Part(Struct):
    """A part of a message."""

    type: str
    text: str = ""


class ChatMessage(Struct):
    """A message of the conversation so far."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[SentToolCall] | None = None
    tool_call_id: str | None = None

    def text(self) -> str | None:
        """What the message says. Raises `BadRequest` for pictures and the like."""
        if isinstance(self.content, list):
            other = next((part.type for part in self.content if part.type not in ("text", "refusal")), None)
            if other is not None:
                raise BadRequest(
                    f"this gateway serves language models; content of type {other!r} cannot be read",
                    param="messages",
                    code="unsupported_content",
                )
            return "".join(part.text for part in self.content)
        return self.content


class FunctionSpec(Struct):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool of the kind that there is."""

    function: FunctionSpec
    type: Literal["function"] = "function"


class NamedFunction(Struct):
    name: str


class NamedTool(Struct):
    """The tool that the model has to call."""

    function: NamedFunction
    type: Literal["function"] = "function"


class Common(Struct, kw_only=True):
    """What both kinds of generation take."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | Stops | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Bias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Beyond OpenAI's, as other servers of open models have it.
    top_k: Annotated[int, Meta(ge=1, le=2**20)] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop sequences."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Common, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    # Refused, because the answer would be another one.
    functions: msgspec.Raw | UnsetType = UNSET
    function_call: msgspec.Raw | UnsetType = UNSET
    audio: msgspec.Raw | UnsetType = UNSET


Tokens = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]


class CompletionRequest(Common, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: str | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts: texts, or token ids. Raises `BadRequest`."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        single = bool(self.prompt) and all(isinstance(one, int) for one in self.prompt)
        prompts = [self.prompt] if single else self.prompt
        for form in (list[str], list[Tokens]):
            try:
                found: Any = msgspec.convert(prompts, Annotated[form, Meta(min_length=1, max_length=MAX_CHOICES)])
            except msgspec.ValidationError:
                continue
            return found  # type: ignore[no-any-return]
        raise BadRequest(
            f"prompt must be a text, a list of 1 to {MAX_CHOICES} texts, or lists of token ids", param="prompt"
        )


_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_FIELD = re.compile(r"field `([^`]+)`")


def read_chat(body: bytes) -> ChatRequest:
    """Check the body of a chat request. Raises `BadRequest`."""
    request: ChatRequest = _read(_chat, body)
    for name in ("functions", "function_call", "audio"):
        if getattr(request, name) not in (UNSET, msgspec.Raw(b"null")):
            advice = "; use tools and tool_choice" if name != "audio" else ""
            raise BadRequest(f"{name} is not supported{advice}", param=name, code="unsupported_parameter")
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if request.tool_choice not in (None, "none", "auto") and not request.tools:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    return request


def read_completion(body: bytes) -> CompletionRequest:
    """Check the body of a completion request. Raises `BadRequest`."""
    request: CompletionRequest = _read(_completion, body)
    if request.suffix:
        raise BadRequest("suffix is not supported", param="suffix", code="unsupported_parameter")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise BadRequest("best_of is not supported; use n", param="best_of", code="unsupported_parameter")
    if request.echo and request.logprobs is not None:
        raise BadRequest("echo and logprobs together are not supported", param="echo", code="unsupported_parameter")
    return request


def _read(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _PATH.search(message)
        field = _FIELD.search(message)
        param = (path[1] if path and path[1] else None) or (field[1] if field else None)
        raise BadRequest(message.replace("`$.", "`").replace(" - at", ", at"), param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON that can be read: {error}", code="invalid_json") from None
