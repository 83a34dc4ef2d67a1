"""Fields that other servers take and this one does not: refused by name, unless their value changes nothing.

Ignoring one would give another answer than the client asked for. Fields that are not in the tables are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from swarm.gateway.openai.api_errors import BadRequest

MAX_NEUTRAL_BYTES = 64
"""No value that changes nothing is longer."""

Neutral = tuple[Any, ...]
"""Values that change nothing, besides null."""

COMMON: Mapping[str, tuple[Neutral, str]] = {
    "add_special_tokens": ((), ""),
    "allowed_token_ids": ((), "use logit_bias or structured_outputs"),
    "bad_words": (([],), "use logit_bias"),
    "early_stopping": ((False,), ""),
    "enable_thinking": ((), "write it into chat_template_kwargs"),
    "grammar": (("",), "use structured_outputs with json, regex or choice"),
    "guided_grammar": ((), "use guided_json, guided_regex or guided_choice"),
    "guided_whitespace_pattern": ((), ""),
    "ignore_eos": ((False,), "use logit_bias against the end token"),
    "include_stop_str_in_output": ((False,), ""),
    "json_schema": (({},), "use response_format"),
    "length_penalty": ((1,), ""),
    "logits_processors": (([],), ""),
    "min_tokens": ((0,), "use logit_bias against the end token"),
    "mirostat": ((0,), ""),
    "prompt_logprobs": ((), "use /v1/completions with echo and logprobs"),
    "repeat_penalty": ((1,), "use repetition_penalty"),
    "return_token_ids": ((False,), ""),
    "return_tokens_as_token_ids": ((False,), ""),
    "skip_special_tokens": ((True,), ""),
    "spaces_between_special_tokens": ((True, False), ""),
    "tfs_z": ((1,), ""),
    "top_a": ((0,), ""),
    "typical_p": ((1,), ""),
    "use_beam_search": ((False,), ""),
}
"""Of both endpoints: the values that change nothing, and what to use instead."""

CHAT: Mapping[str, tuple[Neutral, str]] = {
    **COMMON,
    "audio": ((), ""),
    "chat_template": ((), "the model's own is used"),
    "documents": (([],), "write them into the messages"),
    "echo": ((False,), "use /v1/completions"),
    "function_call": (("none", "auto"), "use tools and tool_choice"),
    "functions": (([],), "use tools and tool_choice"),
    "include_reasoning": ((True,), "leave reasoning_content unread"),
    "modalities": ((["text"],), ""),
    "mm_processor_kwargs": (({},), ""),
    "separate_reasoning": ((True,), ""),
    "web_search_options": ((), ""),
}

COMPLETION: Mapping[str, tuple[Neutral, str]] = {
    **COMMON,
    "add_special_tokens": ((True,), "send the prompt as token ids"),
    "suffix": (("",), ""),
}


def _struct(name: str, fields: Mapping[str, Any]) -> Any:
    return msgspec.defstruct(name, [(field, msgspec.Raw | UnsetType, UNSET) for field in fields])


_CHAT_DECODER = msgspec.json.Decoder(_struct("RefusedChatFields", CHAT))
_COMPLETION_DECODER = msgspec.json.Decoder(_struct("RefusedCompletionFields", COMPLETION))


def refuse_chat_fields(body: bytes) -> None:
    """Refuse a chat request, which is valid JSON, with fields that are not supported.

    Raises:
        BadRequest: it has one, with a value that would change the answer.
    """
    _refuse(_CHAT_DECODER.decode(body), CHAT)


def refuse_completion_fields(body: bytes) -> None:
    """Refuse a completion request, which is valid JSON, with fields that are not supported.

    Raises:
        BadRequest: it has one, with a value that would change the answer.
    """
    _refuse(_COMPLETION_DECODER.decode(body), COMPLETION)


def unsupported(name: str, advice: str = "") -> BadRequest:
    """The error for a field that is not supported."""
    return BadRequest(f"{name} is not supported; {advice or 'leave it out'}", param=name, code="unsupported_parameter")


def _refuse(given: Any, table: Mapping[str, tuple[Neutral, str]]) -> None:
    for name, (neutral, advice) in table.items():
        value = getattr(given, name)
        if value is not UNSET and not _is_neutral(value, neutral):
            raise unsupported(name, advice)


def _is_neutral(raw: msgspec.Raw, neutral: Neutral) -> bool:
    if memoryview(raw).nbytes > MAX_NEUTRAL_BYTES:
        return False
    value = msgspec.json.decode(raw)
    return value is None or any(type(value) is type(one) and value == one for one in _with_floats(neutral))


def _with_floats(neutral: Neutral) -> Neutral:
    """The values, whole numbers also as floats."""
    return (*neutral, *(float(one) for one in neutral if type(one) is int))
