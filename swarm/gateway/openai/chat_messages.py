"""Messages and tools of chat requests as types, which validate their fields.

Fields of the type `Any` are ignored: clients send them back from the answers of other servers. All others that are not
known here are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from swarm.gateway.openai.api_errors import BadRequest

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


class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: str
    text: str = ""
    refusal: str = ""
    cache_control: Any = None
    # Of parts of other types, which are refused.
    image_url: Any = None
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
            return "".join(part.text or part.refusal for part in self.content)
        return self.content if self.content is not None else self.refusal


class FunctionDefinition(Struct, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_.-]{1,64}\Z")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Struct, forbid_unknown_fields=True):
    """A tool that the model may call. Functions are the only type."""

    function: FunctionDefinition
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
