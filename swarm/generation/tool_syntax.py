"""How families of models write calls of tools: a table, and nothing else that knows a family.

The marks are those of the chat templates that the families publish. A family whose calls are no JSON (Qwen3-Coder, GLM)
or stand in channels of their own (gpt-oss) is not in the table: its answers are told as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

NAME = r"(?P<name>[A-Za-z0-9_.-]{1,64})"
LIST = re.compile(r"\s*\[?\s*")
"""What stands before an object that names its function itself: nothing, or the beginning of a list."""


@dataclass(frozen=True)
class ToolSyntax:
    """How a family writes calls.

    A call is one of the marks in `opens`, what `head` matches, and a JSON object. If `head` finds a name, the object
    holds the arguments; if not, it is {"name": ..., `arguments`: {...}}.

    Attributes:
        family: a name for people.
        template: texts of which one list has to be in the chat template, each.
        opens: marks with which calls begin.
        head: everything between the mark and the object.
        closes: marks behind a call, which are no content.
        written: a call as the family writes it, with {call}, or {name} and {arguments}, for calls that are forced.
        arguments: name of the field that holds them.
        bare: the first call may begin without a mark too, at the very beginning of the answer. Behind a call every
            family may go on so.
    """

    family: str
    template: Sequence[Sequence[str]]
    opens: tuple[str, ...]
    head: re.Pattern[str]
    closes: tuple[str, ...]
    written: str
    arguments: str = "arguments"
    bare: bool = False

    def recognises(self, chat_template: str) -> bool:
        """Whether a model with this template writes calls so."""
        return any(all(mark in chat_template for mark in marks) for marks in self.template)


_deepseek = partial(
    ToolSyntax,
    opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    head=re.compile(
        rf"\s*(?:<｜tool▁call▁begin｜>)?\s*(?:function<｜tool▁sep｜>)?{NAME}(?:<｜tool▁sep｜>)?\s*(?:```json\s*)?"
    ),
    closes=("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
"""Both forms are read whatever the template says; they differ in what is written. So it is with Mistral's."""

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
        written="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    _deepseek(
        family="DeepSeek V3.1",
        template=[("<｜tool▁call▁begin｜>",)],
        written="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}"
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
        written="<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    _mistral(
        family="Mistral, names before arguments",
        template=[("[TOOL_CALLS]", "[ARGS]")],
        written="[TOOL_CALLS]{name}[ARGS]{arguments}",
    ),
    _mistral(
        family="Mistral, a list",
        template=[("[TOOL_CALLS]",)],
        written="[TOOL_CALLS][{call}]",
    ),
    ToolSyntax(
        family="Granite",
        template=[("<|tool_call|>",)],
        opens=("<|tool_call|>",),
        head=LIST,
        closes=(",", "]"),
        written="<|tool_call|>[{call}]",
    ),
    ToolSyntax(
        family="Llama 3",
        template=[("<|python_tag|>",), ('"parameters": dictionary of argument name',)],
        opens=("<|python_tag|>",),
        head=re.compile(r"\s*"),
        closes=(";", "<|eom_id|>"),
        written="{call}",
        arguments="parameters",
        bare=True,
    ),
    ToolSyntax(
        family="Hermes and Qwen",
        template=[("<tool_call>", "</tool_call>")],
        opens=("<tool_call>",),
        head=re.compile(r"\s*"),
        closes=("</tool_call>",),
        written="<tool_call>\n{call}\n</tool_call>",
    ),
)

NOT_JSON = ("<function=", "<arg_key>")
"""In templates that use known marks around something else."""


def tool_syntax(chat_template: str) -> ToolSyntax | None:
    """How a model with this template writes calls; None if it knows no tools, or writes calls in no way known here."""
    if any(mark in chat_template for mark in NOT_JSON):
        return None
    return next((syntax for syntax in TABLE if syntax.recognises(chat_template)), None)
