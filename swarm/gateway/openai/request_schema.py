"""The requests of OpenAI's interface as types, which validate their fields and ranges.

Unknown fields are refused by name, except for those that change no answer (`refused_fields`), so that no client gets
another answer than it asked for. Fields that are there for that have the type `Any`.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.chat_messages import MAX_TOOLS, ChatMessage, ToolChoice, ToolDefinition
from swarm.gateway.openai.early_exit_options import EarlyExitRequest
from swarm.gateway.openai.refused_fields import CHAT, COMPLETION, RefusedFields, refuse_fields, unsupported
from swarm.gateway.openai.structured_outputs import FormFields

MAX_CHOICES = 8
"""Answers to one prompt."""

MAX_TEXTS = 256
"""Texts that one request may generate. A few at a time are."""

MAX_STOPS = 16
MAX_MESSAGES = 4096
MAX_STOP_TOKENS = 64
MAX_TEMPLATE_VARIABLES = 32

UNLIMITED = -1
"""As `max_tokens`: as many as the context has room for."""

TokenCount = Annotated[int, Meta(ge=UNLIMITED, le=2**31)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
StopSequence = Annotated[str, Meta(max_length=256)]
StopSequences = Annotated[list[StopSequence], Meta(max_length=MAX_STOPS)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
StopTokens = Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKENS)]
LogitBias = dict[str, Annotated[float, Meta(ge=-100, le=100)]]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """Options of a streamed response."""

    include_usage: bool = False
    include_obfuscation: Any = None
    continuous_usage_stats: Any = None


class GenerationRequest(FormFields, kw_only=True):
    """The fields that both generation endpoints take."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopSequence | StopSequences | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's, but common among servers of open models.
    top_k: Annotated[int, Meta(ge=-1, le=2**20)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    stop_token_ids: StopTokens | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
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
        """The stop sequences as a list, without empty ones, which stop nothing."""
        return [stop for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or ()) if stop]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


TemplateVariable = Annotated[str, Meta(pattern=r"\A[a-zA-Z_][a-zA-Z0-9_]{0,63}\Z")]


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Annotated[str, Meta(max_length=32)] | None = None
    # Not OpenAI's, but common among servers of open models.
    chat_template_kwargs: dict[TemplateVariable, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class PromptRequest(ChatRequest, kw_only=True):
    """A chat request of which only the prompt is asked for. It need not name its model."""

    model: Annotated[str, Meta(max_length=256)] = ""
    return_token_strs: bool | None = None


TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1)] | None = None

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
                converted: Any = msgspec.convert(prompts, Annotated[form, Meta(min_length=1, max_length=MAX_TEXTS)])
            except msgspec.ValidationError:
                continue
            return converted  # type: ignore[no-any-return]
        raise BadRequest(
            f"prompt must be a text, a list of 1 to {MAX_TEXTS} texts, or lists of token ids", param="prompt"
        )


def _decode_with_whole_numbers(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """The request; 16.0 counts as 16, which languages without whole numbers write."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if "`float`" not in str(error):
            raise
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return decoder.decode(msgspec.json.encode({name: _whole_number(raw) for name, raw in fields.items()}))


def _whole_number(raw: msgspec.Raw) -> msgspec.Raw:
    """The value, without a fraction if that is zero."""
    matched = _WHOLE_NUMBER.fullmatch(raw)
    return msgspec.Raw(matched[1]) if matched else raw


_WHOLE_NUMBER = re.compile(rb"(-?[0-9]{1,15})\.0{1,15}")
_ERROR_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`$")
_MISSING_FIELD = re.compile(r"field `([^`]+)`")
_UNKNOWN_FIELD = re.compile(r"\AObject contains unknown field `(.*?)`(?: - at `|\Z)", re.DOTALL)


def parse_chat_request(body: bytes) -> ChatRequest:
    """Parse the body of a chat request.

    Raises:
        BadRequest: the body is not a valid chat request.
    """
    request: ChatRequest = decode_request(ChatRequest, body, CHAT)
    _check_chat_request(request)
    return request


def parse_prompt_request(body: bytes) -> PromptRequest:
    """Parse a chat request of which only the prompt is asked for. Raises the same as `parse_chat_request`."""
    request: PromptRequest = decode_request(PromptRequest, body, CHAT)
    _check_chat_request(request)
    return request


def _check_chat_request(request: ChatRequest) -> None:
    _require_some(request, "max_tokens", "max_completion_tokens", "truncate_prompt_tokens")
    if len(request.chat_template_kwargs or {}) > MAX_TEMPLATE_VARIABLES:
        raise BadRequest(
            f"chat_template_kwargs may have {MAX_TEMPLATE_VARIABLES} names at most", param="chat_template_kwargs"
        )
    if request.continue_final_message and request.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other; leave one of them out",
            param="continue_final_message",
        )
    if request.continue_final_message and request.messages[-1].role != "assistant":
        raise BadRequest(
            "continue_final_message continues a message of the assistant, and the last one is of another role",
            param="continue_final_message",
        )
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", param="top_logprobs")
    if request.tool_choice not in (None, "none", "auto") and not request.tools:
        raise BadRequest("tool_choice needs tools", param="tool_choice")


def parse_completion_request(body: bytes) -> CompletionRequest:
    """Parse the body of a completion request.

    Raises:
        BadRequest: the body is not a valid completion request.
    """
    request: CompletionRequest = decode_request(CompletionRequest, body, COMPLETION)
    _require_some(request, "truncate_prompt_tokens")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise BadRequest("best_of is not supported; use n", param="best_of", code="unsupported_parameter")
    return request


def _require_some(request: GenerationRequest, *names: str) -> None:
    """Refuse a count of tokens that is 0."""
    for name in names:
        if getattr(request, name) == 0:
            raise BadRequest(f"{name} may not be 0; use 1 or more, or -1 for as many as fit", param=name)


@cache
def _decoder(kind: type[Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode_request(kind: type[Struct], body: bytes, refused: RefusedFields | None = None) -> Any:
    """The body as a request of this kind. If there is a table for some other fields, all others are refused.

    Raises:
        BadRequest: it is not one.
    """
    try:
        request = _decode_with_whole_numbers(_decoder(kind), body)
        if refused is not None:
            refuse_fields(body, kind.__struct_fields__, refused)
        return request
    except msgspec.ValidationError as error:
        message = str(error)
        path = _ERROR_PATH.search(message)
        if unknown := _UNKNOWN_FIELD.search(message):
            raise unsupported(f"{path[1]}.{unknown[1][:64]}" if path else unknown[1][:64]) from None
        field = _MISSING_FIELD.search(message)
        param = (path[1] if path and path[1] else None) or (field[1] if field else None)
        raise BadRequest(message.replace("`$.", "`").replace(" - at", ", at"), param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
