"""How families of models write tool calls: a table, the only place that knows families.

The markers are those of the chat templates that the families publish. Families whose calls are not JSON (Qwen3-Coder,
GLM) or are in channels of their own (gpt-oss) are not in the table: their answers are passed on as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"
LIST = re.compile(r"\s*\[?\s*")
"""Text in front of an object that names its function itself: nothing, or the beginning of a list."""


@dataclass(frozen=True)
class ToolSyntax:
    """How a family writes tool calls.

    A call is one of the markers in `opens`, then what `head` matches, then a JSON object. If `head` finds a name, the
    object holds the arguments; if not, it is {"name": ..., `arguments`: {...}}.

    Attributes:
        family: a name for people.
        template: lists of texts; the family's chat template contains all texts of at least one list.
        opens: markers that begin a call.
        head: everything between the marker and the object.
        closes: markers after a call, which are not content.
        call_template: a call as the family writes it, with {call}, or {name} and {arguments}; for forced calls.
        arguments: name of the field that holds the arguments.
        bare: an answer may begin with a call that has no marker. After a call, the next one never needs a marker.
    """

    family: str
    template: Sequence[Sequence[str]]
    opens: tuple[str, ...]
    head: re.Pattern[str]
    closes: tuple[str, ...]
    call_template: str
    arguments: str = "arguments"
    bare: bool = False

    def matches(self, chat_template: str) -> bool:
        """Whether a model with this chat template belongs to the family."""
        return any(all(text in chat_template for text in texts) for texts in self.template)


_deepseek = partial(
    ToolSyntax,
    opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    head=re.compile(
        rf"\s*(?:<｜tool▁call▁begin｜>)?\s*(?:function<｜tool▁sep｜>)?{NAME}(?:<｜tool▁sep｜>)?\s*(?:```json\s*)?"
    ),
    closes=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
"""Both forms are parsed for every template; they differ in the text of a forced call. So it is with Mistral's."""

_mistral = partial(
    ToolSyntax,
    opens=("[TOOL_CALLS]",),
    head=re.compile(rf"{LIST.pattern}|\s*{NAME}(?:\[CALL_ID\][A-Za-z0-9]{{0,64}})?(?:\[ARGS\])?\s*"),
    closes=(",", "]"),
)

TABLE = (
    _deepseek(
        family="DeepSeek V3 and R1",
        template=[("<｜tool▁call▁begin｜>", "```json")],
        call_template="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    _deepseek(
        family="DeepSeek V3.1",
        template=[("<｜tool▁call▁begin｜>",)],
        call_template="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    ToolSyntax(
        family="Kimi K2",
        template=[("<|tool_calls_section_begin|>",)],
        opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        head=re.compile(
            rf"\s*(?:<\|tool_call_begin\|>)?\s*(?:functions\.)?{NAME}:\d{{1,6}}\s*<\|tool_call_argument_begin\|>\s*"
        ),
        closes=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        call_template="<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    _mistral(
        family="Mistral, names before arguments",
        template=[("[TOOL_CALLS]", "[ARGS]")],
        call_template="[TOOL_CALLS]{name}[ARGS]{arguments}",
    ),
    _mistral(
        family="Mistral, a list",
        template=[("[TOOL_CALLS]",)],
        call_template="[TOOL_CALLS][{call}]",
    ),
    ToolSyntax(
        family="Granite",
        template=[("<|tool_call|>",)],
        opens=("<|tool_call|>",),
        head=LIST,
        closes=(",", "]"),
        call_template="<|tool_call|>[{call}]",
    ),
    ToolSyntax(
        family="Llama 3",
        template=[("<|python_tag|>",), ('"parameters": dictionary of argument name',)],
        opens=("<|python_tag|>",),
        head=re.compile(r"\s*"),
        closes=(";", "<|eom_id|>"),
        call_template="{call}",
        arguments="parameters",
        bare=True,
    ),
    ToolSyntax(
        family="Hermes and Qwen",
        template=[("<tool_call>", "</tool_call>")],
        opens=("<tool_call>",),
        head=re.compile(r"\s*"),
        closes=("</tool_call>",),
        call_template="<tool_call>\n{call}\n</tool_call>",
    ),
)

NOT_JSON = ("<function=", "<arg_key>")
"""Texts in templates that use known markers around calls that are not JSON."""


def tool_syntax(chat_template: str) -> ToolSyntax | None:
    """How a model with this template writes calls; None if it has no tools, or writes calls in an unknown way."""
    if any(text in chat_template for text in NOT_JSON):
        return None
    return next((syntax for syntax in TABLE if syntax.matches(chat_template)), None)
