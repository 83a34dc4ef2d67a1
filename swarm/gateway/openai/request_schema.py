"""The requests of OpenAI's interface as types, which validate their fields and ranges.

Unknown fields are refused by name, except for those that change no answer (`refused_fields`), so that no client gets
another answer than it asked for. Fields of the type `Any` are ignored, or are there to be refused by name: clients send
messages back from the answers of other servers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from swarm.gateway.openai.api_errors import BadRequest
from swarm.gateway.openai.early_exit_options import EarlyExitRequest
from swarm.gateway.openai.refused_fields import CHAT, COMPLETION, RefusedFields, refuse_fields, unsupported
from swarm.generation.formats.response_format import AnswerForm
from swarm.generation.formats.tool_calls import ToolFunction

MAX_TOOLS = 128


class FunctionCall(Struct, forbid_unknown_fields=True):
    """The function of a tool call."""

    name: str
    arguments: str = "{}"
    parsed_arguments: Any = None


class MessageToolCall(Struct, forbid_unknown_fields=True):
    """A tool call in the conversation so far."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"
    index: Any = None
    extra_content: Any = None
    provider_specific_fields: Any = None


class ImageUrl(Struct, forbid_unknown_fields=True):
    """An image. `detail` is a hint: how large the model sees it is for its own processor to say."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: str
    text: str = ""
    refusal: str = ""
    image_url: ImageUrl | None = None
    cache_control: Any = None
    # Of parts of other types, which are refused.
    input_audio: Any = None
    file: Any = None


class ChatMessage(Struct, forbid_unknown_fields=True):
    """A message of the conversation so far."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    audio: None = None
    images: None = None
    id: Any = None
    annotations: Any = None
    parsed: Any = None
    cache_control: Any = None
    provider_specific_fields: Any = None
    reasoning_details: Any = None
    thinking_blocks: Any = None

    def template_content(self) -> str | list[dict[str, str]] | None:
        """The message's text, or its parts if it has images; None if it has no content.

        Raises:
            BadRequest: the content is something else.
        """
        if isinstance(self.content, list):
            kinds = ((part.type, "text" if part.image_url is None else "image_url") for part in self.content)
            other = next((kind for kind, held in kinds if kind not in (held, "refusal")), None)
            if other is not None:
                raise BadRequest(
                    f"content of type {other!r} is not supported; send text and image_url",
                    param="messages",
                    code="unsupported_content",
                )
            if any(part.image_url for part in self.content):
                return [
                    {"type": "image", "url": part.image_url.url}
                    if part.image_url
                    else {"type": "text", "text": part.text or part.refusal}
                    for part in self.content
                ]
            return "".join(part.text or part.refusal for part in self.content)
        return self.content if self.content is not None else self.refusal


class ToolDefinition(Struct, forbid_unknown_fields=True):
    """A tool that the model may call. Functions are the only type."""

    function: ToolFunction
    type: Literal["function"] = "function"
    cache_control: Any = None


class FunctionName(Struct, forbid_unknown_fields=True):
    """The function in a tool choice."""

    name: str


class AllowedTool(Struct, forbid_unknown_fields=True):
    """One of the tools in a tool choice."""

    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Struct, forbid_unknown_fields=True):
    """The tools that the model may call, or of which it has to call one."""

    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class ToolChoice(Struct, forbid_unknown_fields=True):
    """The tool that the model has to call, or those that it may call."""

    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    type: Literal["function", "allowed_tools"] = "function"

    def __post_init__(self) -> None:
        if (self.function if self.type == "function" else self.allowed_tools) is None:
            raise ValueError(f"tool_choice of type {self.type} needs {self.type}")


MAX_FORM_CHARACTERS = 1 << 16
MAX_ALTERNATIVES = 1024

JsonSchema = dict[str, Any] | str
"""A JSON schema, or its text."""

Pattern = Annotated[str, Meta(min_length=1, max_length=MAX_FORM_CHARACTERS)]
Alternatives = Annotated[list[Pattern], Meta(min_length=1, max_length=MAX_ALTERNATIVES)]


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """The value of vLLM's `structured_outputs`."""

    json: JsonSchema | None = None
    regex: Pattern | None = None
    choice: Alternatives | None = None
    json_object: bool | None = None
    # Refused, or about how vLLM does it.
    grammar: Any = None
    structural_tag: Any = None
    whitespace_pattern: Any = None
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None
    disable_fallback: Any = None


_TAKEN = ("json", "regex", "choice", "json_object", "disable_fallback")


class FormFields(Struct, kw_only=True):
    """The fields of a request that ask for a form. At most one of them is given."""

    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Alternatives | None = None

    def form(self) -> AnswerForm | None:
        """What the answer has to be; None for any text.

        Raises:
            BadRequest: several forms are asked for, or one that is not supported.
        """
        forms = [form for form in self._forms() if form.value.get("type") != "text"]
        if len(forms) > 1:
            names = " and ".join(form.parameter for form in forms)
            raise BadRequest(f"{names} ask for several forms; leave all but one of them out", param=forms[1].parameter)
        return forms[0] if forms else None

    def _forms(self) -> list[AnswerForm]:
        forms = []
        if self.response_format is not None:
            forms.append(AnswerForm(self.response_format))
        if (asked := self.structured_outputs) is not None:
            for name in asked.__struct_fields__:
                if name not in _TAKEN and getattr(asked, name) not in (None, False):
                    raise unsupported(f"structured_outputs.{name}", "use json, regex or choice")
            forms += _given("structured_outputs.", asked.json, asked.regex, asked.choice)
            if asked.json_object:
                forms.append(AnswerForm({"type": "json_object"}, "structured_outputs.json_object"))
        return forms + _given("guided_", self.guided_json, self.guided_regex, self.guided_choice)


def schema_format(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """The value of `response_format` for JSON of a schema."""
    return {"type": "json_schema", "json_schema": {"schema": schema}}


def _given(prefix: str, schema: JsonSchema | None, regex: str | None, choice: list[str] | None) -> list[AnswerForm]:
    """Those of the forms that are given."""
    forms: list[AnswerForm] = []
    if schema is not None:
        name = f"{prefix}json"
        forms.append(AnswerForm(schema_format(_schema(schema, name)), name))
    if regex is not None:
        forms.append(AnswerForm({"type": "regex", "regex": regex}, f"{prefix}regex"))
    if choice is not None:
        forms.append(AnswerForm({"type": "choice", "choice": choice}, f"{prefix}choice"))
    return forms


def _schema(schema: JsonSchema, name: str) -> Mapping[str, Any]:
    if not isinstance(schema, str):
        return schema
    try:
        decoded: dict[str, Any] = msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{name} is not a JSON schema: {error}", param=name, code="invalid_schema") from None
    return decoded


MAX_CHOICES = 8
"""Answers to one prompt."""

MAX_TEXTS = 256
"""Texts that one request may generate. A few at a time are."""

MAX_EMBEDDINGS = 2048
"""Texts in one request for embeddings, as in OpenAI's interface."""

MAX_STOPS = 16
MAX_MESSAGES = 4096
MAX_STOP_TOKENS = 64
MAX_TEMPLATE_VARIABLES = 32

UNLIMITED = -1
"""As `max_tokens`: as many as the context has room for."""

TokenCount = Annotated[int, Meta(ge=UNLIMITED, le=2**31)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**20)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=10)]
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


ModelName = Annotated[str, Meta(min_length=1, max_length=256)]


class GenerationRequest(FormFields, kw_only=True):
    """The fields that both generation endpoints take."""

    model: ModelName
    max_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopSequence | StopSequences | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's, but common among servers of open models.
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
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
        """All prompts, as texts or as token ids. Raises `BadRequest` if the prompt has none of the allowed forms."""
        return _texts(self.prompt, "prompt", MAX_TEXTS)


class EmbeddingRequest(Struct, kw_only=True):
    """The body of `POST /v1/embeddings`."""

    model: ModelName
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] = "float"

    def prompts(self) -> list[str] | list[list[int]]:
        """All texts, as texts or as token ids. Raises `BadRequest` if the input has none of the allowed forms."""
        return _texts(self.input, "input", MAX_EMBEDDINGS)


def _texts(asked: str | list[Any], name: str, most: int) -> list[str] | list[list[int]]:
    if isinstance(asked, str):
        return [asked]
    single = bool(asked) and all(isinstance(item, int) for item in asked)
    prompts = [asked] if single else asked
    for form in (list[str], list[TokenIds]):
        try:
            converted: Any = msgspec.convert(prompts, Annotated[form, Meta(min_length=1, max_length=most)])
        except msgspec.ValidationError:
            continue
        return converted  # type: ignore[no-any-return]
    raise BadRequest(f"{name} must be a text, a list of 1 to {most} texts, or lists of token ids", param=name)


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
_OTHER_TYPE = re.compile(r"Invalid (?:enum )?value ('.*') - at `\$\.(.*)\.type`", re.DOTALL)
_MISSING_FIELD = re.compile(r"field `([^`]+)`")
_UNKNOWN_FIELD = re.compile(r"\AObject contains unknown field `(.*?)`(?: - at `|\Z)", re.DOTALL)


def parse_chat_request(body: bytes) -> ChatRequest:
    """Parse the body of a chat request.

    Raises:
        BadRequest: the body is not a valid chat request.
    """
    request = decode_request(ChatRequest, body, CHAT)
    check_chat_request(request)
    return request


def check_chat_request(request: ChatRequest) -> None:
    """Raises `BadRequest` if the fields of a chat request do not go together."""
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
    request = decode_request(CompletionRequest, body, COMPLETION)
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


R = TypeVar("R", bound=Struct)


def decode_request(kind: type[R], body: bytes, refused: RefusedFields | None = None) -> R:
    """The body as a request of this kind. If there is a table for some other fields, all others are refused.

    Raises:
        BadRequest: it is not one.
    """
    try:
        request: R = _decode_with_whole_numbers(_decoder(kind), body)
        if refused is not None:
            refuse_fields(body, kind.__struct_fields__, refused)
        return request
    except msgspec.ValidationError as error:
        message = str(error)
        path = _ERROR_PATH.search(message)
        if unknown := _UNKNOWN_FIELD.search(message):
            raise unsupported(f"{path[1]}.{unknown[1][:64]}" if path else unknown[1][:64]) from None
        if other := _OTHER_TYPE.fullmatch(message):
            what = f"{other[2]} of type {other[1][:64]}"
            raise BadRequest(f"{what} is not supported; leave it out", param=other[2]) from None
        field = _MISSING_FIELD.search(message)
        param = (path[1] if path and path[1] else None) or (field[1] if field else None)
        raise BadRequest(message.replace("`$.", "`").replace(" - at", ", at"), param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
