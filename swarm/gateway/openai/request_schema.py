"""The requests of OpenAI's interface as types, which validate their fields and ranges.

Unknown fields are ignored, as are OpenAI's fields that have no meaning here. Fields that would change the answer but
are not supported are rejected by name, so that no client gets another answer than it asked for.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.early_exit_options import EarlyExitRequest

MAX_CHOICES = 8
"""Texts that one request may generate."""

MAX_STOPS = 16
MAX_MESSAGES = 4096
MAX_TOOLS = 128

TokenCount = Annotated[int, Meta(ge=1, le=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopSequence = Annotated[str, Meta(min_length=1, max_length=256)]
StopSequences = Annotated[list[StopSequence], Meta(max_length=MAX_STOPS)]
LogitBias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]


class StreamOptions(Struct):
    """Options of a streamed response."""

    include_usage: bool = False


class FunctionCall(Struct):
    """The function of a tool call."""

    name: str
    arguments: str = "{}"


class MessageToolCall(Struct):
    """A tool call in the conversation so far."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"


class ContentPart(Struct):
    """A part of a message's content."""

    type: str
    text: str = ""


class ChatMessage(Struct):
    """A message of the conversation so far."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    def text(self) -> str | None:
        """The message's text; None if it has no content.

        Raises:
            BadRequest: the content is not text.
        """
        if isinstance(self.content, list):
            other = next((part.type for part in self.content if part.type not in ("text", "refusal")), None)
            if other is not None:
                raise BadRequest(
                    f"this gateway serves text models; content of type {other!r} is not supported",
                    param="messages",
                    code="unsupported_content",
                )
            return "".join(part.text for part in self.content)
        return self.content


class FunctionDefinition(Struct):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct):
    """A tool that the model may call. Functions are the only type."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class FunctionName(Struct):
    """The function in a tool choice."""

    name: str


class NamedToolChoice(Struct):
    """The tool that the model has to call."""

    function: FunctionName
    type: Literal["function"] = "function"


class GenerationRequest(Struct, kw_only=True):
    """The fields that both generation endpoints take."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopSequence | StopSequences | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's, but common among servers of open models.
    top_k: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    # This gateway's own.
    early_exit: EarlyExitRequest | bool | None = None

    def __post_init__(self) -> None:
        if self.provisional and not self.stream:
            raise ValueError("early_exit.provisional needs stream=true")

    @property
    def provisional(self) -> bool:
        """Whether events with text that is not verified yet are asked for."""
        return isinstance(self.early_exit, EarlyExitRequest) and self.early_exit.provisional

    @property
    def stops(self) -> list[str]:
        """The stop sequences as a list."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Rejected, because ignoring them would change the answer.
    functions: msgspec.Raw | UnsetType = UNSET
    function_call: msgspec.Raw | UnsetType = UNSET
    audio: msgspec.Raw | UnsetType = UNSET


TokenIds = Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None
    suffix: str | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        """All prompts, as texts or as token ids.

        Raises:
            BadRequest: the prompt has none of the allowed forms.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        single = bool(self.prompt) and all(isinstance(item, int) for item in self.prompt)
        prompts = [self.prompt] if single else self.prompt
        for form in (list[str], list[TokenIds]):
            try:
                converted: Any = msgspec.convert(prompts, Annotated[form, Meta(min_length=1, max_length=MAX_CHOICES)])
            except msgspec.ValidationError:
                continue
            return converted  # type: ignore[no-any-return]
        raise BadRequest(
            f"prompt must be a text, a list of 1 to {MAX_CHOICES} texts, or lists of token ids", param="prompt"
        )


_CHAT_DECODER = msgspec.json.Decoder(ChatRequest)
_COMPLETION_DECODER = msgspec.json.Decoder(CompletionRequest)
_ERROR_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MISSING_FIELD = re.compile(r"field `([^`]+)`")


def parse_chat_request(body: bytes) -> ChatRequest:
    """Parse the body of a chat request.

    Raises:
        BadRequest: the body is not a valid chat request.
    """
    request: ChatRequest = _decode(_CHAT_DECODER, body)
    for name in ("functions", "function_call", "audio"):
        if getattr(request, name) not in (UNSET, msgspec.Raw(b"null")):
            advice = "; use tools and tool_choice" if name != "audio" else ""
            raise BadRequest(f"{name} is not supported{advice}", param=name, code="unsupported_parameter")
    if request.top_logprobs is not None and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if request.tool_choice not in (None, "none", "auto") and not request.tools:
        raise BadRequest("tool_choice needs tools", param="tool_choice")
    return request


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Parse the body of a completion request.

    Raises:
        BadRequest: the body is not a valid completion request.
    """
    request: CompletionRequest = _decode(_COMPLETION_DECODER, body)
    if request.suffix:
        raise BadRequest("suffix is not supported", param="suffix", code="unsupported_parameter")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise BadRequest("best_of is not supported; use n", param="best_of", code="unsupported_parameter")
    if request.echo and request.logprobs is not None:
        raise BadRequest("echo and logprobs together are not supported", param="echo", code="unsupported_parameter")
    return request


def _decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        path = _ERROR_PATH.search(message)
        field = _MISSING_FIELD.search(message)
        param = (path[1] if path and path[1] else None) or (field[1] if field else None)
        raise BadRequest(message.replace("`$.", "`").replace(" - at", ", at"), param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
