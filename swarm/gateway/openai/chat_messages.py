"""Messages and tools of chat requests as types, which validate their fields."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from swarm.gateway.openai.api_errors import BadRequest

MAX_TOOLS = 128


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

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: FunctionCall | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

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


class AllowedTool(Struct):
    """One of the tools in a tool choice."""

    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(Struct):
    """The tools that the model may call, or of which it has to call one."""

    tools: Annotated[list[AllowedTool], Meta(min_length=1, max_length=MAX_TOOLS)]
    mode: Literal["auto", "required"] = "auto"


class ToolChoice(Struct):
    """The tool that the model has to call, or those that it may call."""

    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None
    type: Literal["function", "allowed_tools"] = "function"

    def __post_init__(self) -> None:
        if (self.function if self.type == "function" else self.allowed_tools) is None:
            raise ValueError(f"tool_choice of type {self.type} needs {self.type}")
